use proptest::prelude::*;

use super::super::maps::tests::files;
use super::*;

fn location(path: &str) -> Location {
    Location {
        device: "8:1".into(),
        path: path.into(),
    }
}

const MOUNTS: [(&str, &str); 6] = [
    ("/state/shim/1", "/opt/bursar/lib"),
    ("/state/shim/1/ld.so.preload", "/etc/ld.so.preload"),
    ("/state/shim/1/libcuda.so.1", "/usr/lib64/libcuda.so.1"),
    ("/state/shim/1/libcuda.so.1", "/usr/lib/x/libcuda.so.1"),
    ("/drv/libcuda.so.5", "/opt/bursar/drv/cuda.so.1"),
    ("/run/alloc/7", "/run/bursar"),
];

fn expected() -> Vec<ExpectedMount> {
    let mount = |(source, point): (&str, &str)| ExpectedMount {
        mount_point: point.into(),
        source: location(source),
        is_of_driver: source.starts_with("/drv/"),
    };
    MOUNTS.map(mount).to_vec()
}

/// A container with all expected mounts, a `/proc`, and `more`.
fn table(more: &str) -> MountTable {
    let lines = MOUNTS.iter().zip(200..).map(|((source, point), id)| {
        format!("{id} 100 8:1 {source} {point} ro - ext4 /dev/sda1 rw\n")
    });
    let rest = "100 90 0:50 / / rw - overlay overlay rw\n101 100 0:51 / /proc rw - proc proc rw\n";
    MountTable::parse(&(rest.to_owned() + &lines.collect::<String>() + more))
}

fn gap_reason(mounts: &MountTable) -> Option<GapReason> {
    check_mounts(&expected(), mounts).map(|gap| gap.reason)
}

#[test]
fn container_has_no_gap_when_every_mount_is_present() {
    assert_eq!(check_mounts(&expected(), &table("")), None);
    let other_mount = "300 100 0:60 / /usr/lib/x/other rw - tmpfs t rw\n";
    assert_eq!(check_mounts(&expected(), &table(other_mount)), None);
}

#[test]
fn missing_mount_is_named() {
    for (source, point) in MOUNTS {
        let without: String = MOUNTS
            .iter()
            .filter(|mount| mount.1 != point)
            .zip(200..)
            .map(|((source, point), id)| {
                format!("{id} 100 8:1 {source} {point} ro - ext4 /dev/sda1 rw\n")
            })
            .collect();
        let mounts = MountTable::parse(&format!("100 90 0:50 / / rw - overlay o rw\n{without}"));
        let gap = check_mounts(&expected(), &mounts).unwrap();
        assert_eq!(
            (gap.reason, gap.detail.as_str()),
            (GapReason::MountMissing, point),
            "{source}"
        );
    }
}

#[test]
fn mount_is_found_when_its_folder_is_a_link_in_the_image() {
    let linked: String = MOUNTS
        .iter()
        .zip(200..)
        .map(|((source, point), id)| {
            let point = point.replace("/usr/lib64/", "/usr/lib/");
            format!("{id} 100 8:1 {source} {point} ro - ext4 /dev/sda1 rw\n")
        })
        .collect();
    let mounts = MountTable::parse(&format!("100 90 0:50 / / rw - overlay o rw\n{linked}"));
    assert_eq!(check_mounts(&expected(), &mounts), None);
}

#[test]
fn file_of_another_build_is_a_gap_when_mounted_over_ours() {
    let swapped = "300 202 8:1 /state/shim/0/libcuda.so.1 /usr/lib64/libcuda.so.1 ro - ext4 d rw\n";
    let gap = check_mounts(&expected(), &table(swapped)).unwrap();
    assert_eq!(
        (gap.reason, gap.detail.as_str()),
        (GapReason::MountedOver, "/usr/lib64/libcuda.so.1")
    );
}

/// A container's table in which a mount has another source.
fn table_with(point: &str, device: &str, source: &str) -> MountTable {
    let line = |(number, (own, at)): (usize, &(&str, &str))| {
        let (device, own) = if *at == point {
            (device, source)
        } else {
            ("8:1", *own)
        };
        format!("{} 100 {device} {own} {at} ro - ext4 d rw\n", 200 + number)
    };
    let mounts: String = MOUNTS.iter().enumerate().map(line).collect();
    MountTable::parse(&format!("100 90 0:50 / / rw - overlay o rw\n{mounts}"))
}

#[test]
fn drivers_file_that_the_node_renamed_or_removed_is_no_gap() {
    let point = "/opt/bursar/drv/cuda.so.1";
    let gap = |mounts: &MountTable| gap_reason(mounts);
    for name in ["/drv/libcuda.so.580", "/drv/libcuda.so.5//deleted"] {
        assert_eq!(gap(&table_with(point, "8:1", name)), None, "{name}");
    }
    let mounted_over = Some(GapReason::MountedOver);
    assert_eq!(
        gap(&table_with(point, "8:1", "/tenant/libcuda.so.5")),
        mounted_over
    );
    assert_eq!(
        gap(&table_with(point, "8:2", "/drv/libcuda.so.580")),
        mounted_over
    );
    let shim = "/usr/lib64/libcuda.so.1";
    assert_eq!(
        gap(&table_with(shim, "8:1", "/state/shim/1/other")),
        mounted_over
    );
    // The renamed file's mount is still there, under another.
    let text = "100 90 0:50 / / rw - overlay o rw\n\
        200 100 8:1 /drv/libcuda.so.580 /opt/bursar/drv/cuda.so.1 ro - ext4 d rw\n\
        201 200 8:1 /drv/libcuda.so.9 /opt/bursar/drv/cuda.so.1 ro - ext4 d rw\n";
    let of_driver: Vec<_> = expected()
        .into_iter()
        .filter(|mount| mount.is_of_driver)
        .collect();
    let gap = check_mounts(&of_driver, &MountTable::parse(text)).unwrap();
    assert_eq!(gap.reason, GapReason::MountedOver);
}

#[test]
fn container_is_set_up_when_its_program_runs_or_time_is_over() {
    assert!(is_set_up(false, Duration::ZERO));
    assert!(!is_set_up(true, Duration::ZERO));
    assert!(!is_set_up(true, MAX_SETUP / 2), "a machine may be busy");
    assert!(is_set_up(true, MAX_SETUP));
}

/// A mount point: an expected one, a folder above one, or a path in one.
fn mount_point() -> impl Strategy<Value = PathBuf> {
    let below = prop_oneof![Just(None), Just(Some("libcuda.so.1")), Just(Some("a/b"))];
    (0..MOUNTS.len(), 0..4_usize, below).prop_map(|(index, depth, below)| {
        let point = Path::new(MOUNTS[index].1);
        match below {
            Some(below) if depth == 0 => point.join(below),
            _ => point
                .ancestors()
                .nth(depth)
                .unwrap_or(Path::new("/"))
                .to_owned(),
        }
    })
}

proptest! {
    #[test]
    fn mount_over_any_of_our_paths_is_a_gap(point in mount_point()) {
        let (parent, _) = { let table = table(""); let (mount, at) = table.resolve(&point).unwrap(); (mount.clone(), at) };
        let id = table("").iter().position(|mount| *mount == parent).unwrap();
        // Ids in the order of `table`: the root, /proc, then the expected mounts from 200 on.
        let id = match id { 0 => 100, 1 => 101, index => 198 + index };
        let over = format!("300 {id} 0:60 / {} rw - tmpfs t rw\n", point.display());
        prop_assert_eq!(gap_reason(&table(&over)), Some(GapReason::MountedOver), "{}", over);
    }
}

fn installed() -> InstalledShim {
    InstalledShim {
        builds: location("/state/shim"),
        files: BTreeMap::from([
            ("0/libcuda.so.1".into(), 10),
            ("1/libcuda.so.1".into(), 11),
            ("1/libcuda.so".into(), 12),
        ]),
    }
}

fn check_maps(maps: &[&str]) -> (bool, Option<GapReason>) {
    let text: String = maps
        .iter()
        .map(|file| format!("7f00-7f01 r-xp 0 08:01 {file}\n"))
        .collect();
    let uses = check_process(&files(&text), &table(""), &installed());
    (uses.has_shim, uses.gap.map(|gap| gap.reason))
}

const SHIM: &str = "11 /opt/bursar/lib/libcuda.so.1";
const DRIVER: &str = "20 /opt/bursar/drv/cuda.so.1";

#[test]
fn process_has_no_gap_when_the_shim_is_mapped() {
    assert_eq!(check_maps(&[]), (false, None));
    assert_eq!(check_maps(&[SHIM]), (true, None));
    assert_eq!(
        check_maps(&["11 /usr/lib64/libcuda.so.1", DRIVER, "5 /dev/nvidia0"]),
        (true, None)
    );
    assert_eq!(
        check_maps(&["12 /opt/bursar/lib/libcuda.so", SHIM]),
        (true, None)
    );
}

#[test]
fn process_has_a_gap_when_it_uses_driver_without_shim() {
    for maps in [
        &[DRIVER][..],
        &["5 /dev/nvidiactl"],
        &["5 /dev/nvidia0", DRIVER],
    ] {
        assert_eq!(
            check_maps(maps),
            (false, Some(GapReason::DriverWithoutShim)),
            "{maps:?}"
        );
    }
}

#[test]
fn foreign_libcuda_is_a_gap_with_or_without_the_shim() {
    for file in [
        "99 /tmp/libcuda.so.1",
        "99 /usr/lib64/libcuda.so.580.95.05",
        // The shim's path with another inode: mapped while another file was mounted over it.
        "99 /opt/bursar/lib/libcuda.so.1",
        "11 /opt/bursar/lib/libcuda.so.1 (deleted)",
        "11 /libcuda.so.1",
        "99 /home/compat/libcuda.so.1",
    ] {
        assert_eq!(
            check_maps(&[file]),
            (false, Some(GapReason::ForeignDriver)),
            "{file}"
        );
        assert_eq!(
            check_maps(&[SHIM, file]),
            (true, Some(GapReason::ForeignDriver)),
            "{file}"
        );
    }
}

#[test]
fn compat_library_is_a_gap_without_the_shim_alone() {
    let compat = "30 /usr/local/cuda-12.4/compat/libcuda.so.550.54.15";
    assert_eq!(check_maps(&[SHIM, compat]), (true, None));
    assert_eq!(
        check_maps(&[compat]),
        (false, Some(GapReason::ForeignDriver))
    );
}

#[test]
fn shim_file_is_known_by_path_on_an_overlay() {
    let over = "300 100 8:1 /state /mnt rw - overlay o rw\n";
    let mapped = files("7f00-7f01 r-xp 0 08:01 99 /mnt/shim/0/libcuda.so.1\n");
    let uses = check_process(&mapped, &table(over), &installed());
    assert_eq!((uses.has_shim, uses.gap), (true, None));
}

#[test]
fn device_check_is_needed_with_mknod_or_other_nodes() {
    let given = BTreeSet::from(["nvidia0".to_owned()]);
    let more = BTreeSet::from(["nvidia0", "nvidia1"].map(str::to_owned));
    let (usual, bare) = (0xa80425fb, 0);
    assert!(needs_device_check(&given, &given, usual, true));
    assert!(
        !needs_device_check(&given, &given, usual, false),
        "in a user namespace of its own"
    );
    assert!(!needs_device_check(&given, &given, bare, true));
    assert!(needs_device_check(&given, &more, bare, false));
    assert!(is_gpu_node("nvidia0") && !is_gpu_node("nvidiactl") && !is_gpu_node("nvidia-uvm"));
}

#[test]
fn openable_node_of_another_gpu_is_a_gap() {
    assert_eq!(check_openable(&BTreeSet::new()), None);
    let gap = check_openable(&BTreeSet::from(["nvidia1", "nvidia2"].map(str::to_owned))).unwrap();
    assert_eq!(
        (gap.reason, gap.detail.as_str()),
        (GapReason::OtherGpus, "nvidia1, nvidia2")
    );
}

#[test]
fn sys_nice_over_the_host_is_a_gap_of_its_own() {
    let (usual, nice) = (0xa80425fb, 0xa80425fb | 1 << 23);
    assert_eq!(
        check_scheduling(nice, true).unwrap().reason,
        GapReason::SysNice
    );
    assert_eq!(check_scheduling(nice, false), None);
    assert_eq!(check_scheduling(usual, true), None);
    assert_eq!(check_capabilities(nice, true), None, "and no other");
}

#[test]
fn gap_detail_is_truncated() {
    let gap = EnforcementGap::not_attested("ü".repeat(10_000));
    assert_eq!(gap.detail.len(), 256);
}

#[test]
fn sys_admin_is_a_gap_over_the_host_alone() {
    assert_eq!(
        check_capabilities(u64::MAX, true).unwrap().reason,
        GapReason::Privileged
    );
    assert_eq!(check_capabilities(u64::MAX, false), None);
    let usual = 0xa80425fb;
    assert_eq!(
        check_capabilities(usual, true),
        None,
        "a container's usual set"
    );
}
