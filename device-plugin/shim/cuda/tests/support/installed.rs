//! Installs the shims as the agent does.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use bursar_host::driver_files::{Driver, LIBCUDA, LIBNVML};
use bursar_node::shim_install;

/// Installs the shims in `folder` for the simulated driver, under this version, of a simulation.
/// Returns the driver and the folder of the shims.
pub fn install_shims(folder: &Path, sim: &Path, version: &str) -> (Driver, PathBuf) {
    bursar_sim_lab::build(&["bursar-sim-nvml", "bursar-nvml-shim"], &["--lib"]).unwrap();
    let (host, image) = (folder.join("host"), folder.join("shim"));
    let libraries = host.join("usr/lib64");
    fs::create_dir_all(&libraries).unwrap();
    fs::create_dir(&image).unwrap();
    for (soname, driver, shim) in [
        (LIBCUDA, "libbursar_sim_cuda.so", "libbursar_shim.so"),
        (LIBNVML, "libbursar_sim_nvml.so", "libbursar_nvml_shim.so"),
    ] {
        let stem = soname.trim_end_matches('1');
        let file = format!("{stem}{version}");
        fs::copy(super::built().join(driver), libraries.join(&file)).unwrap();
        symlink(file, libraries.join(soname)).unwrap();
        fs::copy(super::built().join(shim), image.join(soname)).unwrap();
    }
    let driver = Driver::find(&host, &host, &sim.join("dev")).unwrap();
    let installed = shim_install::install(&image, &driver, &folder.join("state")).unwrap();
    (driver, installed)
}
