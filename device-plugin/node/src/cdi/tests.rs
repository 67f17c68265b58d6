use bursar_host::driver_files::{LIBNVML, NVIDIA_SMI};

use super::dir::CdiListing;
use super::*;
use std::collections::BTreeSet;

fn file(soname: &str) -> DriverFile {
    DriverFile {
        soname: soname.to_owned(),
        path: Path::new("/driver-root/usr/lib64").join(soname),
        host_path: Path::new("/usr/lib64").join(soname),
        stamp: Default::default(),
    }
}

fn node() -> CdiNode {
    CdiNode {
        driver: Driver {
            libcuda: file(LIBCUDA),
            libnvml: file(LIBNVML),
            helpers: vec![file("libnvidia-ptxjitcompiler.so.1")],
            smi: Some(file(NVIDIA_SMI)),
            version: None,
            control_nodes: vec!["nvidiactl".to_owned(), "nvidia-uvm".to_owned()],
            dev_root: "/host/dev".into(),
        },
        shim_dir: "/var/lib/bursar/shim/0123456789abcdef".into(),
        alloc_dir: "/run/bursar/alloc".into(),
        extra_mounts: vec![HostMount {
            host_path: "/run/simgpu".into(),
            container_path: "/run/simgpu".into(),
            read_only: false,
        }],
    }
}

fn binding(id: u64) -> CdiBinding {
    let gpu = |uuid: &str, node: &str| BoundGpu {
        uuid: uuid.parse().unwrap(),
        quota: Bytes::gib(10),
        nodes: vec![node.to_owned()],
    };
    CdiBinding {
        allocation: AllocationId::from_bits(id),
        pod: "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11".parse().unwrap(),
        container: "main".to_owned(),
        device_ids: "0-9".parse().unwrap(),
        gpus: vec![gpu("GPU-aaaa", "nvidia0"), gpu("GPU-bbbb", "nvidia3")],
    }
}

fn edits() -> ContainerEdits {
    build_spec(&node(), &binding(7))
        .devices
        .remove(0)
        .container_edits
}

fn source_of(container_path: &str) -> Option<PathBuf> {
    let mounts = edits().mounts.into_iter();
    let mut found = mounts.filter(|mount| mount.container_path == Path::new(container_path));
    let first = found.next().map(|mount| mount.host_path);
    assert!(found.next().is_none(), "{container_path} is mounted twice");
    first
}

#[test]
fn container_gets_the_device_nodes_of_its_gpus_only() {
    let nodes: Vec<_> = edits()
        .device_nodes
        .into_iter()
        .map(|node| (node.path, node.host_path))
        .collect();
    let expected = ["nvidia-uvm", "nvidia0", "nvidia3", "nvidiactl"].map(|name| {
        (
            Path::new("/dev").join(name),
            Path::new("/host/dev").join(name),
        )
    });
    assert_eq!(nodes, expected);
}

#[test]
fn shim_is_mounted_in_every_default_library_dir() {
    let shim = Some("/var/lib/bursar/shim/0123456789abcdef/libcuda.so.1".into());
    for dir in CONTAINER_DEFAULT_DIRS {
        assert_eq!(source_of(&format!("{dir}/libcuda.so.1")), shim);
        assert_eq!(source_of(&format!("{dir}/libcuda.so")), shim);
        assert_eq!(
            source_of(&format!("{dir}/libnvidia-ml.so.1")),
            Some("/var/lib/bursar/shim/0123456789abcdef/libnvidia-ml.so.1".into())
        );
        assert_eq!(
            source_of(&format!("{dir}/libnvidia-ptxjitcompiler.so.1")),
            Some("/usr/lib64/libnvidia-ptxjitcompiler.so.1".into())
        );
    }
    assert_eq!(
        source_of("/opt/bursar/lib"),
        Some("/var/lib/bursar/shim/0123456789abcdef".into())
    );
    assert_eq!(
        source_of("/etc/ld.so.preload"),
        Some("/var/lib/bursar/shim/0123456789abcdef/ld.so.preload".into())
    );
}

#[test]
fn nvidia_smi_is_mounted_in_usr_bin() {
    assert_eq!(
        source_of("/usr/bin/nvidia-smi"),
        Some("/usr/lib64/nvidia-smi".into())
    );
}

#[test]
fn driver_files_have_names_that_ldconfig_ignores() {
    assert_eq!(
        source_of("/opt/bursar/drv/cuda.so.1"),
        Some("/usr/lib64/libcuda.so.1".into())
    );
    assert_eq!(
        source_of("/opt/bursar/drv/nvidia-ml.so.1"),
        Some("/usr/lib64/libnvidia-ml.so.1".into())
    );
    for mount in edits().mounts {
        if mount.container_path.starts_with(CONTAINER_DRIVER_DIR) {
            let name = mount
                .container_path
                .file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned();
            assert!(
                !name.starts_with("lib") && !name.starts_with("ld-"),
                "{name}"
            );
        }
    }
}

#[test]
fn container_sees_its_socket_only_and_read_only_mounts() {
    assert_eq!(
        source_of("/run/bursar"),
        Some("/run/bursar/alloc/0000000000000007".into())
    );
    let writable = edits()
        .mounts
        .into_iter()
        .filter(|mount| !mount.options.contains(&"ro".to_owned()));
    let writable: Vec<_> = writable.map(|mount| mount.container_path).collect();
    assert_eq!(writable, [Path::new("/run/simgpu")]);
}

#[test]
fn cdi_file_has_the_format_that_runtimes_read() {
    let value = serde_json::to_value(build_spec(&node(), &binding(7))).unwrap();
    assert_eq!(value["cdiVersion"], "0.6.0");
    assert_eq!(value["kind"], "bursar.dev/gpu");
    let device = &value["devices"][0];
    assert_eq!(device["name"], "0000000000000007");
    let edits = &device["containerEdits"];
    assert_eq!(edits["env"][0], "NVIDIA_VISIBLE_DEVICES=void");
    assert_eq!(edits["env"][1], "TRITON_LIBCUDA_PATH=/opt/bursar/lib");
    assert_eq!(edits["deviceNodes"][0]["hostPath"], "/host/dev/nvidia-uvm");
    assert_eq!(edits["mounts"][0]["containerPath"], "/opt/bursar/lib");
    assert!(edits.get("hooks").is_none());
}

#[test]
fn bindings_are_read_back_from_cdi_files() {
    let folder = tempfile::tempdir().unwrap();
    let dir = CdiDir::new(folder.path().join("cdi"));
    assert_eq!(dir.list().unwrap(), CdiListing::default());
    dir.write(&node(), &binding(9)).unwrap();
    dir.write(&node(), &binding(8)).unwrap();
    dir.write(&node(), &binding(8)).unwrap();
    assert_eq!(
        dir.list().unwrap(),
        CdiListing {
            bindings: vec![binding(8), binding(9)],
            unreadable: BTreeSet::new()
        }
    );
    dir.remove(&AllocationId::from_bits(9)).unwrap();
    dir.remove(&AllocationId::from_bits(9)).unwrap();
    assert_eq!(dir.list().unwrap().bindings, [binding(8)]);
    assert_eq!(
        std::fs::read_dir(folder.path().join("cdi"))
            .unwrap()
            .count(),
        1,
        "nothing else is left"
    );
}

#[test]
fn foreign_cdi_files_are_ignored_and_broken_ones_named() {
    let folder = tempfile::tempdir().unwrap();
    let dir = CdiDir::new(folder.path().to_owned());
    let broken = folder.path().join("bursar.dev-gpu-0000000000000001.json");
    std::fs::write(folder.path().join("nvidia.yaml"), "kind: nvidia.com/gpu").unwrap();
    std::fs::write(folder.path().join("bursar.dev-gpu-x.json"), "{}").unwrap();
    std::fs::write(&broken, "{\"cdiVersion\": \"0.6").unwrap();
    dir.write(&node(), &binding(2)).unwrap();
    assert_eq!(
        dir.list().unwrap(),
        CdiListing {
            bindings: vec![binding(2)],
            unreadable: BTreeSet::from([AllocationId::from_bits(1)])
        }
    );
}

#[test]
fn binding_of_a_later_version_is_unread_and_its_file_stays() {
    let folder = tempfile::tempdir().unwrap();
    let dir = CdiDir::new(folder.path().to_owned());
    dir.write(&node(), &binding(1)).unwrap();
    let path = folder.path().join("bursar.dev-gpu-0000000000000001.json");
    let written = std::fs::read_to_string(&path).unwrap();
    let version = r#"\"version\":1,"#;
    assert!(written.contains(version), "{written}");
    for (text, is_read) in [("", true), (r#"\"version\":2,"#, false)] {
        std::fs::write(&path, written.replace(version, text)).unwrap();
        let listed = dir.list().unwrap();
        assert_eq!(listed.bindings.len(), usize::from(is_read), "{text}");
        assert_eq!(listed.unreadable.len(), usize::from(!is_read), "{text}");
        assert!(path.exists());
    }
}

#[test]
fn binding_of_a_golden_cdi_file_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let dir = CdiDir::new(folder.path().to_owned());
    let path = folder.path().join("bursar.dev-gpu-0000000000000007.json");
    let today = || {
        dir.write(&node(), &binding(7)).unwrap();
        std::fs::read(&path).unwrap()
    };
    bursar_protocol::testing::for_each_record("cdi.json", today, |golden| {
        std::fs::write(&path, golden).unwrap();
        assert_eq!(dir.list().unwrap().bindings, [binding(7)]);
        assert!(dir.read_edits(&AllocationId::from_bits(7)).is_some());
    });
}

#[test]
fn mounted_paths_are_unknown_when_a_cdi_file_is_unreadable() {
    let folder = tempfile::tempdir().unwrap();
    let dir = CdiDir::new(folder.path().to_owned());
    dir.write(&node(), &binding(1)).unwrap();
    let mounted = dir.mounted_host_paths().unwrap();
    let shim = node().shim_dir;
    assert!(
        mounted.iter().any(|path| path.starts_with(&shim)),
        "{mounted:?}"
    );
    std::fs::write(folder.path().join("nvidia.yaml"), "kind: nvidia.com/gpu").unwrap();
    assert_eq!(dir.mounted_host_paths(), Some(mounted));
    let later = folder.path().join("bursar.dev-gpu-0000000000000002.json");
    std::fs::write(later, "{}").unwrap();
    assert_eq!(dir.mounted_host_paths(), None);
}

#[test]
fn unwritable_cdi_dir_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let blocked = folder.path().join("file");
    std::fs::write(&blocked, "").unwrap();
    let error = CdiDir::new(blocked)
        .write(&node(), &binding(1))
        .unwrap_err();
    assert_eq!(error.reason(), "CdiWriteFailed");
    assert!(
        error
            .to_string()
            .contains("bursar.dev-gpu-0000000000000001.json"),
        "{error}"
    );
}
