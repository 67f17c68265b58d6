use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;

/// A host's file system in a temporary directory.
struct FakeHost(TempDir);

impl FakeHost {
    fn new() -> FakeHost {
        FakeHost(tempfile::tempdir().unwrap())
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn file(self, path: &str) -> FakeHost {
        let path = self.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
        self
    }

    fn link(self, path: &str, target: &str) -> FakeHost {
        let path = self.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
        self
    }

    fn driver_in(self, dir: &str) -> FakeHost {
        self.file(&format!("{dir}/libcuda.so.580.95.05"))
            .link(&format!("{dir}/libcuda.so.1"), "libcuda.so.580.95.05")
            .file(&format!("{dir}/libnvidia-ml.so.580.95.05"))
            .link(
                &format!("{dir}/libnvidia-ml.so.1"),
                "libnvidia-ml.so.580.95.05",
            )
            .file(&format!("{dir}/libnvidia-ptxjitcompiler.so.1"))
            .file(&format!("{dir}/libnvidia-gpucomp.so.580.95.05"))
    }

    fn nodes(self) -> FakeHost {
        self.nodes_in("dev")
    }

    fn nodes_in(self, dir: &str) -> FakeHost {
        ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0"]
            .iter()
            .fold(self, |host, name| host.file(&format!("{dir}/{name}")))
    }

    fn find(&self) -> Result<Driver, DriverError> {
        Driver::find(self.root(), Path::new("/host"), &self.root().join("dev"))
    }
}

#[test]
fn driver_is_found_in_every_library_dir() {
    for dir in LIBRARY_DIRS {
        let host = FakeHost::new().driver_in(dir).nodes();
        let driver = host.find().unwrap();
        assert_eq!(
            driver.libcuda.path,
            host.root().join(dir).join("libcuda.so.580.95.05")
        );
        assert_eq!(
            driver.libcuda.host_path,
            Path::new("/host").join(dir).join("libcuda.so.580.95.05")
        );
        assert_eq!(driver.libnvml.soname, LIBNVML);
        assert_eq!(driver.version.as_deref(), Some("580.95.05"));
        let helpers: Vec<_> = driver
            .helpers
            .iter()
            .map(|file| file.soname.as_str())
            .collect();
        assert_eq!(
            helpers,
            [
                "libnvidia-ptxjitcompiler.so.1",
                "libnvidia-gpucomp.so.580.95.05"
            ]
        );
        assert_eq!(
            driver.control_nodes,
            ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
        );
    }
}

/// The found library, version, helpers and directory of device nodes.
fn found(host: &FakeHost) -> (PathBuf, Option<String>, Vec<PathBuf>, PathBuf) {
    let driver = host.find().unwrap();
    assert_eq!(
        driver.libnvml.host_path.parent(),
        driver.libcuda.host_path.parent()
    );
    let helpers = driver.helpers.into_iter().map(|file| file.host_path);
    (
        driver.libcuda.host_path,
        driver.version,
        helpers.collect(),
        driver.dev_root,
    )
}

#[test]
#[cfg(target_arch = "x86_64")]
fn debian_alternatives_lead_to_files_beside_the_driver_only() {
    let (multiarch, current) = (
        "usr/lib/x86_64-linux-gnu",
        "usr/lib/x86_64-linux-gnu/nvidia/current",
    );
    let mut host = FakeHost::new().driver_in(current).nodes();
    for soname in [LIBCUDA, LIBNVML] {
        let alternative = format!("etc/alternatives/glx--{soname}-x86_64-linux-gnu");
        host = host
            .link(&format!("{multiarch}/{soname}"), &format!("/{alternative}"))
            .link(&alternative, &format!("/{current}/{soname}"));
    }
    let at = |name: &str| Path::new("/host").join(current).join(name);
    assert_eq!(
        found(&host),
        (
            at("libcuda.so.580.95.05"),
            Some("580.95.05".to_owned()),
            vec![
                at("libnvidia-ptxjitcompiler.so.1"),
                at("libnvidia-gpucomp.so.580.95.05")
            ],
            host.root().join("dev"),
        )
    );
}

#[test]
fn driver_is_found_in_usr_lib64_beside_32_bit_libraries() {
    let host = FakeHost::new()
        .driver_in("usr/lib64")
        .file("usr/lib/libcuda.so.1")
        .link("lib64", "usr/lib64")
        .nodes();
    assert_eq!(
        found(&host).0,
        Path::new("/host/usr/lib64/libcuda.so.580.95.05")
    );
}

#[test]
fn driver_container_has_libraries_and_device_nodes() {
    let dir = "run/nvidia/driver/usr/lib64";
    let host = FakeHost::new().driver_in(dir).nodes();
    assert_eq!(
        found(&host).3,
        host.root().join("dev"),
        "the host's come first"
    );
    let host = FakeHost::new()
        .driver_in(dir)
        .nodes_in("run/nvidia/driver/dev");
    let (libcuda, _, _, nodes) = found(&host);
    assert_eq!(
        libcuda,
        Path::new("/host").join(dir).join("libcuda.so.580.95.05")
    );
    assert_eq!(nodes, Path::new("/host/run/nvidia/driver/dev"));
    let other_directory = FakeHost::new()
        .driver_in("usr/lib64")
        .nodes_in("run/nvidia/driver/dev");
    assert_eq!(
        other_directory.find().unwrap_err().reason(),
        "DeviceNodeMissing"
    );
}

#[test]
fn driver_root_can_be_the_driver_containers_root() {
    let host = FakeHost::new().driver_in("usr/lib64").nodes();
    let driver = Driver::find(
        host.root(),
        Path::new("/run/nvidia/driver"),
        &host.root().join("dev"),
    );
    assert_eq!(
        driver.unwrap().libcuda.host_path,
        Path::new("/run/nvidia/driver/usr/lib64/libcuda.so.580.95.05")
    );
}

#[test]
fn driver_is_found_on_container_optimized_os() {
    let dir = "home/kubernetes/bin/nvidia/lib64";
    let host = FakeHost::new()
        .driver_in(dir)
        .file("usr/lib64/libc.so.6")
        .nodes();
    assert_eq!(
        found(&host).0,
        Path::new("/host").join(dir).join("libcuda.so.580.95.05")
    );
}

#[test]
#[cfg(target_arch = "x86_64")]
fn driver_is_found_on_bottlerocket_before_and_since_580() {
    let sys_root = "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib";
    let old = format!("{sys_root}/nvidia/tesla");
    let host = FakeHost::new().driver_in(&old).nodes();
    assert_eq!(
        found(&host).0,
        Path::new("/host").join(&old).join("libcuda.so.580.95.05")
    );
    let mut host = FakeHost::new()
        .driver_in(sys_root)
        .link("usr", "x86_64-bottlerocket-linux-gnu/sys-root/usr")
        .nodes();
    for name in ["libcuda.so.1", "libcuda.so.580.95.05"] {
        host = host.link(&format!("{old}/{name}"), &format!("../../{name}"));
    }
    let (libcuda, _, helpers, _) = found(&host);
    let at = Path::new("/host").join(sys_root);
    assert_eq!(libcuda, at.join("libcuda.so.580.95.05"));
    assert_eq!(
        helpers.len(),
        2,
        "found beside the library that the link leads to"
    );
}

#[test]
fn nvidia_smi_is_optional_and_found_beside_the_libraries() {
    for (libraries, tools) in [
        ("usr/lib64", "usr/bin"),
        ("run/nvidia/driver/usr/lib64", "run/nvidia/driver/usr/bin"),
        (
            "home/kubernetes/bin/nvidia/lib64",
            "home/kubernetes/bin/nvidia/bin",
        ),
        ("usr/lib/nvidia/tesla", "usr/bin"),
        ("usr/local/nvidia/lib64", "usr/local/nvidia/bin"),
    ] {
        let host = FakeHost::new().driver_in(libraries).nodes();
        assert_eq!(host.find().unwrap().smi, None, "{libraries}");
        let smi = host
            .file(&format!("{tools}/nvidia-smi"))
            .find()
            .unwrap()
            .smi;
        let at = Path::new("/host").join(tools).join("nvidia-smi");
        assert_eq!(smi.map(|smi| smi.host_path), Some(at), "{libraries}");
    }
}

#[test]
fn absolute_link_resolves_below_the_root() {
    let host = FakeHost::new()
        .file("opt/driver/libcuda.so.1")
        .file("opt/driver/libnvidia-ml.so.1")
        .link("usr/lib64", "/opt/driver")
        .nodes();
    let driver = host.find().unwrap();
    assert_eq!(
        driver.libcuda.host_path,
        Path::new("/host/opt/driver/libcuda.so.1")
    );
    assert_eq!(driver.version, None);
}

#[test]
fn link_with_parent_parts_stays_below_the_root() {
    let host = FakeHost::new()
        .link("usr/lib64/libcuda.so.1", "../../../../../../etc/hostname")
        .nodes();
    assert!(matches!(host.find(), Err(DriverError::NoLibrary { .. })));
}

#[test]
fn link_loop_is_an_error_that_names_the_file() {
    let host = FakeHost::new()
        .link("usr/lib64/libcuda.so.1", "libcuda.so.1")
        .nodes();
    let error = host.find().unwrap_err();
    assert!(matches!(error, DriverError::Read { .. }));
    assert!(
        error.to_string().contains("usr/lib64/libcuda.so.1"),
        "{error}"
    );
}

#[test]
fn missing_driver_names_searched_dirs_and_remedy() {
    let host = FakeHost::new().nodes();
    let error = host.find().unwrap_err().to_string();
    for part in [
        "usr/lib64",
        "home/kubernetes/bin/nvidia/lib64",
        "driver.root",
        "install",
    ] {
        assert!(error.contains(part), "{part} is missing in: {error}");
    }
}

#[test]
fn driver_without_nvml_is_incomplete() {
    let host = FakeHost::new().file("usr/lib64/libcuda.so.1").nodes();
    let error = host.find().unwrap_err();
    assert_eq!(error.reason(), "DriverIncomplete");
    assert!(error.to_string().contains("libnvidia-ml.so.1"), "{error}");
}

#[test]
fn missing_control_node_is_named_with_the_remedy() {
    let host = FakeHost::new().driver_in("usr/lib64").file("dev/nvidiactl");
    let error = host.find().unwrap_err();
    assert_eq!(error.reason(), "DeviceNodeMissing");
    assert!(
        error.to_string().contains("dev/nvidia-uvm")
            && error.to_string().contains("nvidia-modprobe")
    );
}
