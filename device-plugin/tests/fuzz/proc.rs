//! Fuzzes files of `/proc` that tenant processes shape.

use std::path::Path;

use bursar_enforcement::attestation::maps::DriverFiles;
use bursar_enforcement::attestation::mounts::MountTable;
use bursar_host::procfs::{ProcessOwner, Stat, bounding_capabilities};

use crate::search_text;

/// Each file found is the end of a line, and no line hides a file of another line.
#[test]
fn memory_map_lines_are_distinguished() {
    search_text("maps", |text| {
        let found = |text: &str| {
            let mut files = DriverFiles::default();
            text.lines().for_each(|line| files.add_line(line));
            files.get().cloned().unwrap_or_default()
        };
        let all = found(text);
        for file in &all {
            let path = file.path.to_str().unwrap();
            assert!(text.lines().any(|line| line.ends_with(path)), "{file:?}");
        }
        assert_eq!(all, text.lines().flat_map(found).collect());
    });
}

/// A mount table of any content resolves every path to some place or none, in a bounded number of
/// steps.
#[test]
fn mount_table_walk_always_ends() {
    search_text("mountinfo", |text| {
        let mut mounts = MountTable::default();
        text.lines().for_each(|line| mounts.add_line(line));
        assert!(mounts.iter().count() <= text.lines().count());
        for path in ["/", "/opt/bursar/lib/libcuda.so.1", "/a b", "relative"] {
            if let Some((mount, found)) = mounts.resolve(Path::new(path)) {
                assert_eq!(found.device, mount.source.device);
                assert!(
                    found.path.starts_with(&mount.source.path),
                    "{path}: {found:?}"
                );
            }
        }
        for mount in mounts.iter() {
            mounts.is_visible(mount);
        }
    });
}

/// A process's name shifts no field after it.
#[test]
fn process_name_shifts_no_field_of_stat() {
    search_text("stat", |text| {
        let stat = Stat::parse(text);
        if let Some((_, fields)) = text.rsplit_once(')') {
            assert_eq!(Stat::parse(&format!("1 (x){fields}")), stat, "{text}");
        }
        if let Some(stat) = stat {
            assert!(
                text.contains(&stat.start_ticks.to_string()) || text.contains('+'),
                "{text}"
            );
            let _ = stat.start_time();
        }
    });
}

/// Capabilities come from a line that begins with the field's name.
#[test]
fn capabilities_come_from_their_field_alone() {
    search_text("status", |text| {
        let field = text.lines().find_map(|line| line.strip_prefix("CapBnd:"));
        let expected = field.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
        assert_eq!(bounding_capabilities(text), expected);
    });
}

/// A process's owner comes from its cgroup path: a pod's name and a folder below it.
#[test]
fn cgroup_owner_is_parsed_from_the_path() {
    search_text("cgroup", |text| {
        if let ProcessOwner::Container { pod, cgroup } = ProcessOwner::parse(text) {
            // systemd's names contain no dashes.
            let plain = |text: &str| text.replace('_', "-");
            assert!(plain(text).contains(&plain(pod.as_str())), "{pod:?}");
            assert!(!cgroup.is_empty() && !cgroup.contains('/'), "{cgroup}");
            assert!(text.contains(&cgroup));
        }
    });
}
