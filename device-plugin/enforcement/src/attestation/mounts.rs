//! Resolves a path by a process's mount table: pure.
//!
//! A mount table (`/proc/<pid>/mountinfo`, proc_pid_mountinfo(5)) lists each mount with its file
//! system's device and the mounted path in that file system. So the agent can resolve a container's
//! path without entering a tenant's file systems, and compare the result with a path of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A file or folder by its file system. It is equal in every mount namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// The file system's device, `major:minor`.
    pub device: String,
    /// The path in the file system.
    pub path: PathBuf,
}

/// One mount of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    id: u32,
    parent: u32,
    /// The mounted file or folder.
    pub source: Location,
    /// The mount point, relative to the root of the process.
    pub mount_point: PathBuf,
    /// The file system's type.
    pub(crate) fs_type: String,
}

/// The mounts of one mount namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountTable {
    mounts: Vec<Mount>,
    /// The indices in `mounts` of the mounts on each mount, by the parent's id.
    children: BTreeMap<u32, Vec<usize>>,
    /// The ids of the mounts at the root of the process.
    root_ids: BTreeSet<u32>,
}

impl MountTable {
    /// Parses a `mountinfo`; malformed lines are skipped.
    #[cfg(test)]
    pub fn parse(text: &str) -> Self {
        let mut mounts = Self::default();
        text.lines().for_each(|line| mounts.add_line(line));
        mounts
    }

    /// Adds a line of a `mountinfo`; a malformed line is skipped.
    pub fn add_line(&mut self, line: &str) {
        let Some(mount) = parse_line(line) else {
            return;
        };
        if mount.mount_point == Path::new("/") {
            self.root_ids.insert(mount.id);
        }
        self.children
            .entry(mount.parent)
            .or_default()
            .push(self.mounts.len());
        self.mounts.push(mount);
    }

    /// The mounts, in the table's order.
    pub fn iter(&self) -> impl Iterator<Item = &Mount> {
        self.mounts.iter()
    }

    /// Resolves an absolute `path` without symbolic links, and returns the last mount on its way.
    /// None where the table has no root.
    pub fn resolve(&self, path: &Path) -> Option<(&Mount, Location)> {
        let is_root = |mount: &&Mount| mount.mount_point == Path::new("/");
        let mut roots = self.iter().filter(is_root);
        let mut current = roots.find(|root| !self.root_ids.contains(&root.parent))?;
        // Each step enters a mount on the one before; the bound ends a table with a cycle.
        for _ in 0..self.mounts.len() {
            let is_prefix =
                |mount: &&Mount| mount.id != current.id && path.starts_with(&mount.mount_point);
            let children = self.children.get(&current.id).into_iter().flatten();
            let children = children.filter_map(|index| self.mounts.get(*index));
            let next = children.filter(is_prefix);
            match next.min_by_key(|mount| mount.mount_point.as_os_str().len()) {
                Some(next) => current = next,
                None => break,
            }
        }
        let below = path.strip_prefix(&current.mount_point).ok()?;
        let source = &current.source;
        // `join` of an empty path would add a slash.
        let path = if below.as_os_str().is_empty() {
            source.path.clone()
        } else {
            source.path.join(below)
        };
        let device = source.device.clone();
        Some((current, Location { device, path }))
    }

    /// Whether the mount's own point resolves to its source, so that no other mount hides it.
    pub fn is_visible(&self, mount: &Mount) -> bool {
        self.resolve(&mount.mount_point)
            .is_some_and(|(_, found)| found == mount.source)
    }
}

/// `36 35 98:0 /mnt1 /mnt/point rw,noatime master:1 - ext3 /dev/root rw`: id, parent, device, root,
/// point, options, any number of optional fields, a dash, the type.
fn parse_line(line: &str) -> Option<Mount> {
    let (fields, rest) = line.split_once(" - ")?;
    let mut fields = fields.split(' ');
    let id = fields.next()?.parse().ok()?;
    let parent = fields.next()?.parse().ok()?;
    let device = fields.next()?.to_owned();
    let path = unescape(fields.next()?);
    let point = unescape(fields.next()?);
    let kind = rest.split(' ').next()?.to_owned();
    // `resolve` takes the rest of a path relative to the mount point.
    point.is_absolute().then_some(Mount {
        id,
        parent,
        source: Location { device, path },
        mount_point: point,
        fs_type: kind,
    })
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(text: &str) -> PathBuf {
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

    fn resolve(table: &str, path: &str) -> Option<(String, String)> {
        let mounts = MountTable::parse(table);
        let (_, found) = mounts.resolve(Path::new(path))?;
        Some((found.device, found.path.display().to_string()))
    }

    fn location(device: &str, path: &str) -> Option<(String, String)> {
        Some((device.to_owned(), path.to_owned()))
    }

    /// A container's root, a file system in it, and a file and a folder of the node.
    const TABLE: &str = "\
        100 90 0:50 / / rw,relatime master:1 - overlay overlay rw\n\
        101 100 0:51 / /proc rw - proc proc rw\n\
        102 100 8:1 /var/lib/x/shim/1 /opt/x/lib ro,nosuid - ext4 /dev/sda1 rw\n\
        103 100 8:1 /lib/cuda.so.5 /opt/x/drv/cuda.so.1 ro - ext4 /dev/sda1 rw\n";

    #[test]
    fn path_resolves_into_the_mount_that_it_passes() {
        assert_eq!(
            resolve(TABLE, "/etc/passwd"),
            location("0:50", "/etc/passwd")
        );
        assert_eq!(
            resolve(TABLE, "/opt/x/lib/libcuda.so.1"),
            location("8:1", "/var/lib/x/shim/1/libcuda.so.1")
        );
        assert_eq!(
            resolve(TABLE, "/opt/x/drv/cuda.so.1"),
            location("8:1", "/lib/cuda.so.5")
        );
        assert_eq!(
            resolve(TABLE, "/opt/x/library"),
            location("0:50", "/opt/x/library")
        );
        assert_eq!(resolve("", "/etc"), None);
    }

    #[test]
    fn mount_is_hidden_when_another_covers_it_or_a_parent() {
        for (over, source_path) in [
            ("104 102 0:60 /f /opt/x/lib rw - tmpfs t rw", "/f/a"),
            ("104 100 0:60 /f /opt rw - tmpfs t rw", "/f/x/lib/a"),
            ("104 102 0:60 /f /opt/x/lib/a rw - tmpfs t rw", "/f"),
            ("104 100 0:60 / / rw - tmpfs t rw", "/opt/x/lib/a"),
        ] {
            let table = format!("{TABLE}{over}\n");
            assert_eq!(
                resolve(&table, "/opt/x/lib/a"),
                location("0:60", source_path),
                "{over}"
            );
            let mounts = MountTable::parse(&table);
            let file = mounts
                .iter()
                .find(|mount| mount.mount_point == Path::new("/opt/x/lib"));
            let is_visible = over.contains(" /opt/x/lib/a ");
            assert_eq!(mounts.is_visible(file.unwrap()), is_visible, "{over}");
        }
    }

    #[test]
    fn mount_is_visible_when_the_lower_one_is_listed_later() {
        let table = "\
            103 102 8:1 /shim /opt/x/lib ro - ext4 /dev/sda1 rw\n\
            102 100 0:60 / /opt rw - tmpfs t rw\n\
            100 90 0:50 / / rw - overlay overlay rw\n";
        assert_eq!(resolve(table, "/opt/x/lib"), location("8:1", "/shim"));
        assert_eq!(resolve(table, "/opt/y"), location("0:60", "/y"));
    }

    #[test]
    fn escaped_names_are_read_and_malformed_lines_skipped() {
        let table = "garbage\n\n100 90 0:50 / / rw - overlay overlay rw\n\
            101 100 0:51 /a\\040b /x\\134y\\9 rw shared:1 master:2 - tmpfs t rw\n\
            102 100 0:52 / - tmpfs t rw\n";
        assert_eq!(resolve(table, "/x\\y\\9/z"), location("0:51", "/a b/z"));
        assert_eq!(MountTable::parse(table).iter().count(), 2);
    }

    #[test]
    fn resolve_ends_when_the_table_has_a_cycle() {
        let table = "1 2 0:1 / / rw - a a rw\n2 1 0:2 / / rw - a a rw\n3 3 0:3 / /x rw - a a rw\n";
        let _ = resolve(table, "/x");
        let table = "1 1 0:1 / / rw - a a rw\n";
        let _ = resolve(table, "/x");
    }

    #[test]
    fn own_root_is_resolved() {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(
            MountTable::parse(&table)
                .resolve(Path::new("/nowhere"))
                .is_some()
        );
    }

    proptest::proptest! {
        /// Mounts whose parents may be missing, later, or in a circle, with one letter changed.
        #[test]
        fn no_table_makes_it_panic(
            mounts in proptest::collection::vec((0_u8..6, 0_u8..6, "/[a/]{0,4}", "/[a/]{0,4}"), 1..8),
            at: proptest::sample::Index, letter in "[0-9 :/a\\\\\n\\-]", path in "/[a/]{0,8}",
        ) {
            let line = |(id, parent, root, point): &(u8, u8, String, String)| {
                format!("{id} {parent} 0:{id} {root} {point} rw - a a rw\n")
            };
            let mut text: String = mounts.iter().map(line).collect();
            let table = MountTable::parse(&text);
            proptest::prop_assert!(table.iter().count() > 0, "{}", text);
            let _ = table.resolve(Path::new(&path));
            let at = at.index(text.len());
            text.replace_range(at..=at, &letter);
            let _ = MountTable::parse(&text).resolve(Path::new(&path));
        }
    }
}
