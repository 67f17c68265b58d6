//! Finds single files and device nodes of the driver below its root.

use std::path::{Path, PathBuf};

use super::{
    CONTROL_NODES, DRIVER_CONTAINER, DriverError, DriverFile, FileStamp, LIBCUDA, LIBRARY_DIRS,
    OPTIONAL_NODES, chroot_path,
};

/// A search below a root that the container runtime knows as `host_root`.
pub(super) struct DriverSearch<'a> {
    pub(super) root: &'a Path,
    pub(super) host_root: &'a Path,
}

impl DriverSearch<'_> {
    /// The first directory with a `libcuda.so.1`, and that library.
    pub(super) fn find_driver_dir(&self) -> Result<(&'static str, DriverFile), DriverError> {
        for dir in LIBRARY_DIRS {
            if let Some(libcuda) = self.find_file(dir, LIBCUDA)? {
                return Ok((dir, libcuda));
            }
        }
        Err(DriverError::NoLibrary {
            root: self.root.to_owned(),
        })
    }

    /// Finds `soname` in `dir`, or beside the file that a link to `libcuda` in `dir` resolves to.
    pub(super) fn find_beside(
        &self,
        dir: &str,
        libcuda: &DriverFile,
        soname: &str,
    ) -> Result<Option<DriverFile>, DriverError> {
        if let Some(found) = self.find_file(dir, soname)? {
            return Ok(Some(found));
        }
        let own = libcuda.path.parent().unwrap_or(self.root);
        let inside = own.strip_prefix(self.root).unwrap_or(own);
        self.find_file(inside, soname)
    }

    /// The control nodes, and their directory as the container runtime sees it.
    pub(super) fn find_device_nodes(
        &self,
        dir: &str,
        dev_root: &Path,
    ) -> Result<(Vec<String>, PathBuf), DriverError> {
        let own = Path::new(DRIVER_CONTAINER).join("dev");
        match list_control_nodes(dev_root) {
            Err(DriverError::NoDeviceNode { path }) if dir.starts_with(DRIVER_CONTAINER) => {
                let nodes = list_control_nodes(&self.root.join(&own));
                let nodes = nodes.map_err(|_| DriverError::NoDeviceNode { path })?;
                Ok((nodes, self.host_root.join(own)))
            }
            found => Ok((found?, dev_root.to_owned())),
        }
    }

    /// Finds the file `soname` in `dir`.
    pub(super) fn find_file(
        &self,
        dir: impl AsRef<Path>,
        soname: &str,
    ) -> Result<Option<DriverFile>, DriverError> {
        let inside = dir.as_ref().join(soname);
        let unreadable = |inside: &Path| {
            let path = self.root.join(inside);
            |source| DriverError::Read { path, source }
        };
        let found = chroot_path::resolve(self.root, &inside).map_err(unreadable(&inside))?;
        let Some(inside) = found else {
            return Ok(None);
        };
        let path = self.root.join(&inside);
        Ok(Some(DriverFile {
            soname: soname.to_owned(),
            stamp: FileStamp::read(&path).map_err(unreadable(&inside))?,
            path,
            host_path: self.host_root.join(&inside),
        }))
    }
}

/// The names of the present control nodes.
fn list_control_nodes(dev_root: &Path) -> Result<Vec<String>, DriverError> {
    let mut nodes = Vec::new();
    for name in CONTROL_NODES {
        let path = dev_root.join(name);
        if !exists(&path)? {
            return Err(DriverError::NoDeviceNode { path });
        }
        nodes.push((*name).to_owned());
    }
    for name in OPTIONAL_NODES {
        if exists(&dev_root.join(name))? {
            nodes.push((*name).to_owned());
        }
    }
    Ok(nodes)
}

fn exists(path: &Path) -> Result<bool, DriverError> {
    path.try_exists().map_err(|source| DriverError::Read {
        path: path.to_owned(),
        source,
    })
}
