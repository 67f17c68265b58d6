use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;

/// A host in a folder.
struct Host(TempDir);

impl Host {
    fn new() -> Host {
        Host(tempfile::tempdir().unwrap())
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn file(self, path: &str) -> Host {
        let path = self.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
        self
    }

    fn link(self, path: &str, target: &str) -> Host {
        let path = self.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
        self
    }

    fn driver_in(self, dir: &str) -> Host {
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

    fn nodes(self) -> Host {
        self.file("dev/nvidiactl")
            .file("dev/nvidia-uvm")
            .file("dev/nvidia-uvm-tools")
            .file("dev/nvidia0")
    }

    fn find(&self) -> Result<Driver, DriverError> {
        Driver::find(self.root(), Path::new("/host"), &self.root().join("dev"))
    }
}

#[test]
fn the_driver_is_found_in_every_folder_of_the_list() {
    for dir in LIBRARY_DIRS {
        let host = Host::new().driver_in(dir).nodes();
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

#[test]
fn an_absolute_link_leads_below_the_root_and_not_to_the_agents_own_files() {
    let host = Host::new()
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
fn a_link_that_climbs_out_of_the_root_stays_in_it() {
    let host = Host::new()
        .link("usr/lib64/libcuda.so.1", "../../../../../../etc/hostname")
        .nodes();
    assert!(matches!(host.find(), Err(DriverError::NoLibrary { .. })));
}

#[test]
fn links_in_a_circle_are_an_error_that_names_the_file() {
    let host = Host::new()
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
fn a_host_without_a_driver_is_told_where_it_was_looked_for_and_what_to_do() {
    let host = Host::new().nodes();
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
fn a_driver_without_its_management_library_is_incomplete() {
    let host = Host::new().file("usr/lib64/libcuda.so.1").nodes();
    let error = host.find().unwrap_err();
    assert_eq!(error.reason(), "DriverIncomplete");
    assert!(error.to_string().contains("libnvidia-ml.so.1"), "{error}");
}

#[test]
fn a_missing_control_node_is_named_with_the_command_that_makes_it() {
    let host = Host::new().driver_in("usr/lib64").file("dev/nvidiactl");
    let error = host.find().unwrap_err();
    assert_eq!(error.reason(), "DeviceNodeMissing");
    assert!(
        error.to_string().contains("dev/nvidia-uvm")
            && error.to_string().contains("nvidia-modprobe")
    );
}
