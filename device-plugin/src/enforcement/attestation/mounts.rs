//! Which file a path leads to, by a process's mount table: pure.
//!
//! A mount table (`/proc/<pid>/mountinfo`, proc_pid_mountinfo(5)) names for each mount the device of its file
//! system and the folder or file in it. So where a container's path leads to can be told without following it
//! into file systems that a tenant made, and compared with where a path of the agent's leads to.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A file or folder by the file system that it is in. The same in every mount namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// The file system's device, `major:minor`.
    pub device: String,
    /// The path in the file system.
    pub path: PathBuf,
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    id: u32,
    parent: u32,
    /// What is mounted.
    pub source: Location,
    /// Where, below the root of the process.
    pub point: PathBuf,
    /// The file system's type.
    pub kind: String,
}

/// A mount table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounts {
    all: Vec<Mount>,
    /// The places in `all` of those that lie on each mount, by its number.
    on: BTreeMap<u32, Vec<usize>>,
    /// The numbers of those at the root of the process.
    roots: BTreeSet<u32>,
}

impl Mounts {
    /// Reads a `mountinfo`. Lines that are none are passed over.
    #[cfg(test)]
    pub fn parse(text: &str) -> Self {
        let mut mounts = Self::default();
        text.lines().for_each(|line| mounts.see(line));
        mounts
    }

    /// Takes in a line of a `mountinfo`; one that is none is passed over.
    pub fn see(&mut self, line: &str) {
        let Some(mount) = mount(line) else { return };
        if mount.point == Path::new("/") {
            self.roots.insert(mount.id);
        }
        self.on
            .entry(mount.parent)
            .or_default()
            .push(self.all.len());
        self.all.push(mount);
    }

    /// The mounts, in the table's order.
    pub fn iter(&self) -> impl Iterator<Item = &Mount> {
        self.all.iter()
    }

    /// What an absolute `path` without symbolic links leads to, and the mount that it is in: the path is walked from
    /// the root, into each mount on the way. None where the table has no root.
    pub fn locate(&self, path: &Path) -> Option<(&Mount, Location)> {
        let is_root = |mount: &&Mount| mount.point == Path::new("/");
        let mut roots = self.iter().filter(is_root);
        let mut here = roots.find(|root| !self.roots.contains(&root.parent))?;
        // Each step enters a mount that lies on the one before; a table with a circle ends it too.
        for _ in 0..self.all.len() {
            let leads = |mount: &&Mount| mount.id != here.id && path.starts_with(&mount.point);
            let on_it = self.on.get(&here.id).into_iter().flatten();
            let on_it = on_it.filter_map(|place| self.all.get(*place));
            let next = on_it.filter(leads);
            match next.min_by_key(|mount| mount.point.as_os_str().len()) {
                Some(next) => here = next,
                None => break,
            }
        }
        let below = path.strip_prefix(&here.point).ok()?;
        let source = &here.source;
        // `join` of an empty path would add a slash.
        let path = if below.as_os_str().is_empty() {
            source.path.clone()
        } else {
            source.path.join(below)
        };
        let device = source.device.clone();
        Some((here, Location { device, path }))
    }

    /// Whether a walk to the mount's own point ends where the mount says: nothing hides it.
    pub fn shows(&self, mount: &Mount) -> bool {
        self.locate(&mount.point)
            .is_some_and(|(_, found)| found == mount.source)
    }
}

/// `36 35 98:0 /mnt1 /mnt/point rw,noatime master:1 - ext3 /dev/root rw`: id, parent, device, root, point, options,
/// any number of optional fields, a dash, the type.
fn mount(line: &str) -> Option<Mount> {
    let (fields, rest) = line.split_once(" - ")?;
    let mut fields = fields.split(' ');
    let id = fields.next()?.parse().ok()?;
    let parent = fields.next()?.parse().ok()?;
    let device = fields.next()?.to_owned();
    let path = unescaped(fields.next()?);
    let point = unescaped(fields.next()?);
    let kind = rest.split(' ').next()?.to_owned();
    // The rest of a walk is taken relative to the point.
    point.is_absolute().then_some(Mount {
        id,
        parent,
        source: Location { device, path },
        point,
        kind,
    })
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescaped(text: &str) -> PathBuf {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        let code = after
            .get(..3)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                out.push(char::from(code));
                rest = &after[3..];
            }
            None => {
                out.push('\\');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(table: &str, path: &str) -> Option<(String, String)> {
        let mounts = Mounts::parse(table);
        let (_, found) = mounts.locate(Path::new(path))?;
        Some((found.device, found.path.display().to_string()))
    }

    fn is(device: &str, path: &str) -> Option<(String, String)> {
        Some((device.to_owned(), path.to_owned()))
    }

    /// A container's root, a file system in it, and a file and a folder of the node.
    const TABLE: &str = "\
        100 90 0:50 / / rw,relatime master:1 - overlay overlay rw\n\
        101 100 0:51 / /proc rw - proc proc rw\n\
        102 100 8:1 /var/lib/x/shim/1 /opt/x/lib ro,nosuid - ext4 /dev/sda1 rw\n\
        103 100 8:1 /lib/cuda.so.5 /opt/x/drv/cuda.so.1 ro - ext4 /dev/sda1 rw\n";

    #[test]
    fn a_path_leads_into_the_mount_that_it_passes() {
        assert_eq!(at(TABLE, "/etc/passwd"), is("0:50", "/etc/passwd"));
        assert_eq!(
            at(TABLE, "/opt/x/lib/libcuda.so.1"),
            is("8:1", "/var/lib/x/shim/1/libcuda.so.1")
        );
        assert_eq!(
            at(TABLE, "/opt/x/drv/cuda.so.1"),
            is("8:1", "/lib/cuda.so.5")
        );
        assert_eq!(at(TABLE, "/opt/x/library"), is("0:50", "/opt/x/library"));
        assert_eq!(at("", "/etc"), None);
    }

    #[test]
    fn a_mount_over_a_path_a_folder_above_it_or_the_root_hides_what_was_there() {
        for (over, leads) in [
            ("104 102 0:60 /f /opt/x/lib rw - tmpfs t rw", "/f/a"),
            ("104 100 0:60 /f /opt rw - tmpfs t rw", "/f/x/lib/a"),
            ("104 102 0:60 /f /opt/x/lib/a rw - tmpfs t rw", "/f"),
            ("104 100 0:60 / / rw - tmpfs t rw", "/opt/x/lib/a"),
        ] {
            let table = format!("{TABLE}{over}\n");
            assert_eq!(at(&table, "/opt/x/lib/a"), is("0:60", leads), "{over}");
            let mounts = Mounts::parse(&table);
            let file = mounts
                .iter()
                .find(|mount| mount.point == Path::new("/opt/x/lib"));
            let whole = over.contains(" /opt/x/lib/a ");
            assert_eq!(mounts.shows(file.unwrap()), whole, "{over}");
        }
    }

    #[test]
    fn a_mount_made_before_ours_hides_nothing_wherever_the_table_lists_it() {
        let table = "\
            103 102 8:1 /shim /opt/x/lib ro - ext4 /dev/sda1 rw\n\
            102 100 0:60 / /opt rw - tmpfs t rw\n\
            100 90 0:50 / / rw - overlay overlay rw\n";
        assert_eq!(at(table, "/opt/x/lib"), is("8:1", "/shim"));
        assert_eq!(at(table, "/opt/y"), is("0:60", "/y"));
    }

    #[test]
    fn odd_names_are_read_and_lines_that_are_no_mount_passed_over() {
        let table = "garbage\n\n100 90 0:50 / / rw - overlay overlay rw\n\
            101 100 0:51 /a\\040b /x\\134y\\9 rw shared:1 master:2 - tmpfs t rw\n\
            102 100 0:52 / - tmpfs t rw\n";
        assert_eq!(at(table, "/x\\y\\9/z"), is("0:51", "/a b/z"));
        assert_eq!(Mounts::parse(table).iter().count(), 2);
    }

    #[test]
    fn a_table_with_a_circle_is_an_answer_and_no_hang() {
        let table = "1 2 0:1 / / rw - a a rw\n2 1 0:2 / / rw - a a rw\n3 3 0:3 / /x rw - a a rw\n";
        let _ = at(table, "/x");
        let table = "1 1 0:1 / / rw - a a rw\n";
        let _ = at(table, "/x");
    }

    #[test]
    fn this_process_finds_its_own_root() {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(
            Mounts::parse(&table)
                .locate(Path::new("/nowhere"))
                .is_some()
        );
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[0-9 :/a\\\\\n\\-]{0,200}", path in "/[a/]{0,8}") {
            let mounts = Mounts::parse(&text);
            let _ = mounts.locate(Path::new(&path));
        }
    }
}
