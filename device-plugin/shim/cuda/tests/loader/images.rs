//! Lays out images as folders: the needed part of a distribution, and an image's own libcuda in
//! four forms.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use crate::programs::{self, COMPAT};
use crate::support;

/// The C library of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// Debian's folders, merged `/usr`, with the 32-bit libraries.
    Glibc,
    /// Alpine's.
    Musl,
}

/// The libcuda that an image has in `/usr/local/cuda/compat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compat {
    /// None.
    Absent,
    /// Of a newer branch than the kernel driver, which NVIDIA's rule selects.
    Newer,
    /// Of an older branch.
    Older,
    /// A newer one that the image's loader finds before others: by `ld.so.conf.d`, or by musl's
    /// path file.
    Configured,
}

impl Compat {
    pub const ALL: [Compat; 4] = [
        Compat::Absent,
        Compat::Newer,
        Compat::Older,
        Compat::Configured,
    ];

    /// Returns the column's title.
    pub fn title(self) -> &'static str {
        match self {
            Compat::Absent => "no libcuda in the image",
            Compat::Newer => "a newer libcuda in the image's compat folder",
            Compat::Older => "an older one there",
            Compat::Configured => "a newer one, and an `ld.so.conf.d` entry for it",
        }
    }

    fn version(self) -> Option<&'static str> {
        match self {
            Compat::Absent => None,
            Compat::Newer | Compat::Configured => Some("999.10.01"),
            Compat::Older => Some("450.80.02"),
        }
    }
}

/// The version of the host's driver.
pub const DRIVER: &str = "580.95.05";

/// Lays an image out in `root`.
pub fn lay_out(root: &Path, base: Base, compat: Compat) {
    for folder in ["etc", "tmp", "proc", "usr/bin", "usr/lib"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    for program in fs::read_dir(programs::folder()).unwrap().flatten() {
        let name = program.file_name().into_string().unwrap();
        if name.starts_with("client") {
            fs::copy(program.path(), root.join("usr/bin").join(name)).unwrap();
        }
    }
    for name in ["client", "client-linked"] {
        let setuid = root
            .join("usr/bin")
            .join(name.replace("client", "client-setuid"));
        fs::copy(programs::folder().join(name), &setuid).unwrap();
        fs::set_permissions(&setuid, fs::Permissions::from_mode(0o4755)).unwrap();
    }
    match base {
        Base::Glibc => glibc(root),
        Base::Musl => musl(root),
    }
    if let Some(version) = compat.version() {
        bring_libcuda(root, version);
    }
    if compat == Compat::Configured {
        let path = format!("{COMPAT}:/lib:/usr/local/lib:/usr/lib\n");
        let file = format!("etc/ld-musl-{}.path", std::env::consts::ARCH);
        fs::write(root.join(file), path).unwrap();
        fs::create_dir(root.join("etc/ld.so.conf.d")).unwrap();
        fs::write(root.join("etc/ld.so.conf.d/00-compat.conf"), COMPAT).unwrap();
        fs::write(
            root.join("etc/ld.so.conf"),
            "include /etc/ld.so.conf.d/*.conf\n",
        )
        .unwrap();
    }
    if base == Base::Glibc {
        programs::run(Command::new("ldconfig").arg("-r").arg(root));
        // An image whose driver package was removed has a dangling link there.
        let folder = root.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
        symlink("libcuda.so.535.104.05", folder.join("libcuda.so.1")).unwrap();
    }
}

fn glibc(root: &Path) {
    let multiarch = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let loader = match cfg!(target_arch = "x86_64") {
        true => "ld-linux-x86-64.so.2",
        false => "ld-linux-aarch64.so.1",
    };
    for folder in [multiarch.as_str(), "usr/lib64", "usr/lib32"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    for folder in ["lib", "lib64", "lib32"] {
        symlink(format!("usr/{folder}"), root.join(folder)).unwrap();
    }
    let own = [
        "libc.so.6",
        "libm.so.6",
        "libdl.so.2",
        "libpthread.so.0",
        "libgcc_s.so.1",
    ];
    take(&["cc"], &own, &root.join(&multiarch));
    take(&["cc"], &[loader], &root.join(&multiarch));
    let by_abi = if cfg!(target_arch = "x86_64") {
        "usr/lib64"
    } else {
        "usr/lib"
    };
    symlink(
        format!("/{multiarch}/{loader}"),
        root.join(by_abi).join(loader),
    )
    .unwrap();
    if cfg!(target_arch = "x86_64") {
        take(
            &["cc", "-m32"],
            &["libc.so.6", "libdl.so.2"],
            &root.join("usr/lib32"),
        );
        take(&["cc", "-m32"], &["ld-linux.so.2"], &root.join("usr/lib"));
    }
}

fn musl(root: &Path) {
    fs::create_dir(root.join("lib")).unwrap();
    let loader = format!("ld-musl-{}.so.1", std::env::consts::ARCH);
    let found = Path::new("/lib").join(&loader);
    fs::copy(found, root.join("lib").join(loader)).unwrap();
}

fn take(compiler: &[&str], names: &[&str], folder: &Path) {
    for name in names {
        let from = programs::system_library(compiler, name);
        let from = from.unwrap_or_else(|| panic!("{compiler:?} knows no {name}"));
        fs::copy(from, folder.join(name)).unwrap();
    }
}

/// The simulated driver stands in for the image's own library, too.
fn bring_libcuda(root: &Path, version: &str) {
    let folder = root.join(COMPAT.trim_start_matches('/'));
    fs::create_dir_all(&folder).unwrap();
    let file = format!("libcuda.so.{version}");
    let library = support::built().join("libbursar_sim_cuda.so");
    fs::copy(library, folder.join(&file)).unwrap();
    symlink(&file, folder.join("libcuda.so.1")).unwrap();
    symlink("libcuda.so.1", folder.join("libcuda.so")).unwrap();
}
