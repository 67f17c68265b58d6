use proptest::prelude::*;

use super::super::maps::tests::files;
use super::*;

fn at(path: &str) -> Location {
    Location {
        device: "8:1".into(),
        path: path.into(),
    }
}

const OURS: [(&str, &str); 6] = [
    ("/state/shim/1", "/opt/bursar/lib"),
    ("/state/shim/1/ld.so.preload", "/etc/ld.so.preload"),
    ("/state/shim/1/libcuda.so.1", "/usr/lib64/libcuda.so.1"),
    ("/state/shim/1/libcuda.so.1", "/usr/lib/x/libcuda.so.1"),
    ("/drv/libcuda.so.5", "/opt/bursar/drv/cuda.so.1"),
    ("/run/alloc/7", "/run/bursar"),
];

fn expected() -> Vec<Expected> {
    let mount = |(source, point): (&str, &str)| Expected {
        point: point.into(),
        source: at(source),
    };
    OURS.map(mount).to_vec()
}

/// A container with all of our mounts, a `/proc`, and `more`.
fn table(more: &str) -> Mounts {
    let ours = OURS.iter().zip(200..).map(|((source, point), id)| {
        format!("{id} 100 8:1 {source} {point} ro - ext4 /dev/sda1 rw\n")
    });
    let rest = "100 90 0:50 / / rw - overlay overlay rw\n101 100 0:51 / /proc rw - proc proc rw\n";
    Mounts::parse(&(rest.to_owned() + &ours.collect::<String>() + more))
}

fn reason(mounts: &Mounts) -> Option<Reason> {
    of_mounts(&expected(), mounts).map(|lack| lack.reason)
}

#[test]
fn a_container_with_every_mount_lacks_nothing() {
    assert_eq!(of_mounts(&expected(), &table("")), None);
    let beside = "300 100 0:60 / /usr/lib/x/other rw - tmpfs t rw\n";
    assert_eq!(of_mounts(&expected(), &table(beside)), None);
}

#[test]
fn a_mount_that_is_not_there_is_named() {
    for (source, point) in OURS {
        let without: String = OURS
            .iter()
            .filter(|ours| ours.1 != point)
            .zip(200..)
            .map(|((source, point), id)| {
                format!("{id} 100 8:1 {source} {point} ro - ext4 /dev/sda1 rw\n")
            })
            .collect();
        let mounts = Mounts::parse(&format!("100 90 0:50 / / rw - overlay o rw\n{without}"));
        let lack = of_mounts(&expected(), &mounts).unwrap();
        assert_eq!(
            (lack.reason, lack.detail.as_str()),
            (Reason::MountMissing, point),
            "{source}"
        );
    }
}

#[test]
fn a_folder_that_is_a_link_in_the_image_has_its_mount_where_the_link_leads() {
    let linked: String = OURS
        .iter()
        .zip(200..)
        .map(|((source, point), id)| {
            let point = point.replace("/usr/lib64/", "/usr/lib/");
            format!("{id} 100 8:1 {source} {point} ro - ext4 /dev/sda1 rw\n")
        })
        .collect();
    let mounts = Mounts::parse(&format!("100 90 0:50 / / rw - overlay o rw\n{linked}"));
    assert_eq!(of_mounts(&expected(), &mounts), None);
}

#[test]
fn a_file_of_another_build_in_the_place_of_ours_is_told() {
    let swapped = "300 202 8:1 /state/shim/0/libcuda.so.1 /usr/lib64/libcuda.so.1 ro - ext4 d rw\n";
    let lack = of_mounts(&expected(), &table(swapped)).unwrap();
    assert_eq!(
        (lack.reason, lack.detail.as_str()),
        (Reason::MountedOver, "/usr/lib64/libcuda.so.1")
    );
}

#[test]
fn a_container_has_its_rights_and_mounts_when_its_program_runs_and_its_runtime_is_not_waited_for_for_ever()
 {
    assert!(is_made(false, Duration::ZERO));
    assert!(!is_made(true, Duration::ZERO));
    assert!(!is_made(true, MAKING / 2), "a machine may be busy");
    assert!(is_made(true, MAKING));
}

/// A place to mount at: one of our paths, a folder above one, or something in one.
fn place() -> impl Strategy<Value = PathBuf> {
    let below = prop_oneof![Just(None), Just(Some("libcuda.so.1")), Just(Some("a/b"))];
    (0..OURS.len(), 0..4_usize, below).prop_map(|(ours, up, below)| {
        let point = Path::new(OURS[ours].1);
        match below {
            Some(below) if up == 0 => point.join(below),
            _ => point
                .ancestors()
                .nth(up)
                .unwrap_or(Path::new("/"))
                .to_owned(),
        }
    })
}

proptest! {
    #[test]
    fn whatever_is_mounted_over_above_or_in_one_of_our_paths_is_told(place in place()) {
        let (parent, _) = { let table = table(""); let (mount, at) = table.locate(&place).unwrap(); (mount.clone(), at) };
        let id = table("").iter().position(|mount| *mount == parent).unwrap();
        // Ids in the order of `table`: the root, /proc, then ours from 200 on.
        let id = match id { 0 => 100, 1 => 101, ours => 198 + ours };
        let over = format!("300 {id} 0:60 / {} rw - tmpfs t rw\n", place.display());
        prop_assert_eq!(reason(&table(&over)), Some(Reason::MountedOver), "{}", over);
    }
}

fn installed() -> Installed {
    Installed {
        builds: at("/state/shim"),
        files: BTreeMap::from([
            ("0/libcuda.so.1".into(), 10),
            ("1/libcuda.so.1".into(), 11),
            ("1/libcuda.so".into(), 12),
        ]),
    }
}

fn uses(maps: &[&str]) -> (bool, Option<Reason>) {
    let text: String = maps
        .iter()
        .map(|file| format!("7f00-7f01 r-xp 0 08:01 {file}\n"))
        .collect();
    let uses = of_process(&files(&text), &table(""), &installed());
    (uses.shim, uses.lack.map(|lack| lack.reason))
}

const SHIM: &str = "11 /opt/bursar/lib/libcuda.so.1";
const DRIVER: &str = "20 /opt/bursar/drv/cuda.so.1";

#[test]
fn a_process_with_the_shim_may_have_the_driver_and_its_device_nodes() {
    assert_eq!(uses(&[]), (false, None));
    assert_eq!(uses(&[SHIM]), (true, None));
    assert_eq!(
        uses(&["11 /usr/lib64/libcuda.so.1", DRIVER, "5 /dev/nvidia0"]),
        (true, None)
    );
    assert_eq!(uses(&["12 /opt/bursar/lib/libcuda.so", SHIM]), (true, None));
}

#[test]
fn a_process_that_uses_the_driver_without_the_shim_is_told() {
    for maps in [
        &[DRIVER][..],
        &["5 /dev/nvidiactl"],
        &["5 /dev/nvidia0", DRIVER],
    ] {
        assert_eq!(
            uses(maps),
            (false, Some(Reason::DriverWithoutShim)),
            "{maps:?}"
        );
    }
}

#[test]
fn a_libcuda_that_is_not_the_shim_is_told_with_the_shim_mapped_or_not() {
    for file in [
        "99 /tmp/libcuda.so.1",
        "99 /usr/lib64/libcuda.so.580.95.05",
        // At the shim's path, with another file's number: mapped while something lay over it.
        "99 /opt/bursar/lib/libcuda.so.1",
        "11 /opt/bursar/lib/libcuda.so.1 (deleted)",
        "11 /libcuda.so.1",
        "99 /home/compat/libcuda.so.1",
    ] {
        assert_eq!(
            uses(&[file]),
            (false, Some(Reason::ForeignDriver)),
            "{file}"
        );
        assert_eq!(
            uses(&[SHIM, file]),
            (true, Some(Reason::ForeignDriver)),
            "{file}"
        );
    }
}

#[test]
fn a_compat_library_is_the_shims_to_open_and_nobody_elses() {
    let compat = "30 /usr/local/cuda-12.4/compat/libcuda.so.550.54.15";
    assert_eq!(uses(&[SHIM, compat]), (true, None));
    assert_eq!(uses(&[compat]), (false, Some(Reason::ForeignDriver)));
}

#[test]
fn on_an_overlay_the_path_decides() {
    let over = "300 100 8:1 /state /mnt rw - overlay o rw\n";
    let mapped = files("7f00-7f01 r-xp 0 08:01 99 /mnt/shim/0/libcuda.so.1\n");
    let uses = of_process(&mapped, &table(over), &installed());
    assert_eq!((uses.shim, uses.lack), (true, None));
}

#[test]
fn who_can_make_nodes_or_has_others_is_asked_what_it_may_open() {
    let given = BTreeSet::from(["nvidia0".to_owned()]);
    let more = BTreeSet::from(["nvidia0", "nvidia1"].map(str::to_owned));
    let (usual, bare) = (0xa80425fb, 0);
    assert!(is_asked(&given, &given, usual, true));
    assert!(
        !is_asked(&given, &given, usual, false),
        "in a user namespace of its own"
    );
    assert!(!is_asked(&given, &given, bare, true));
    assert!(is_asked(&given, &more, bare, false));
    assert!(is_gpu("nvidia0") && !is_gpu("nvidiactl") && !is_gpu("nvidia-uvm"));
}

#[test]
fn what_may_be_opened_is_told_and_a_node_alone_is_not() {
    assert_eq!(of_nodes(&BTreeSet::new()), None);
    let lack = of_nodes(&BTreeSet::from(["nvidia1", "nvidia2"].map(str::to_owned))).unwrap();
    assert_eq!(
        (lack.reason, lack.detail.as_str()),
        (Reason::OtherGpus, "nvidia1, nvidia2")
    );
}

#[test]
fn rights_over_the_hosts_scheduling_are_a_lack_of_their_own() {
    let (usual, nice) = (0xa80425fb, 0xa80425fb | 1 << 23);
    assert_eq!(of_scheduling(nice, true).unwrap().reason, Reason::SysNice);
    assert_eq!(of_scheduling(nice, false), None);
    assert_eq!(of_scheduling(usual, true), None);
    assert_eq!(of_rights(nice, true), None, "and no other");
}

#[test]
fn a_path_in_a_lack_is_cut() {
    let lack = Lack::not_attested("ü".repeat(10_000));
    assert_eq!(lack.detail.len(), 256);
}

#[test]
fn admin_rights_over_the_host_are_a_lack_and_those_over_an_own_user_namespace_none() {
    assert_eq!(
        of_rights(u64::MAX, true).unwrap().reason,
        Reason::Privileged
    );
    assert_eq!(of_rights(u64::MAX, false), None);
    let usual = 0xa80425fb;
    assert_eq!(of_rights(usual, true), None, "a container's usual set");
}
