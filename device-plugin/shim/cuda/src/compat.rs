//! Decides whether the image's own driver library is opened, by NVIDIA's rule of forward
//! compatibility.
//!
//! Images made for a newer CUDA than the node's driver carry that CUDA's `libcuda` in
//! `/usr/local/cuda/compat`. The library works on the older kernel driver within limits, which
//! NVIDIA writes into the library as a note. Older libraries carry none.
//!
//! | | the image's library is opened if |
//! |---|---|
//! | it has the note | the note lists the kernel driver's branch, and the library is newer |
//! | it has no note | its branch is newer than the kernel driver's |
//! | and in both cases | NVIDIA supports it on every GPU of the node: no GeForce, no TITAN |
//!
//! In all other cases, and where a file cannot be read, the host's library is opened. Sources:
//! NVIDIA's "CUDA Compatibility", section Forward Compatibility (data centre GPUs, and RTX cards
//! that are certified for servers). The folder, the note and both comparisons are those of
//! nvidia-container-toolkit's hook `enable-cuda-compat`.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use object::elf::FileHeader64;
use object::read::elf::{FileHeader, SectionHeader};
use object::{LittleEndian, ReadCache};

/// The folder of the image's library.
const COMPAT_DIR: &str = "/usr/local/cuda/compat";

/// The kernel driver's own files about its version and its GPUs, which every container sees.
const DRIVER_PROC_DIR: &str = "/proc/driver/nvidia";

/// The library's file name without the version.
const LIBCUDA_PREFIX: &str = "libcuda.so.";

/// Libraries that the compat library opens by name, and would otherwise find in the host's version.
const HELPER_PREFIX: &str = "libnvidia-";

/// A driver's version, `580.95.05`. The first number is the branch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(Vec<u32>);

impl Version {
    fn parse(text: &str) -> Option<Version> {
        let numbers: Result<Vec<u32>, _> = text.split('.').map(str::parse).collect();
        numbers.ok().filter(|all| all.len() >= 2).map(Version)
    }

    fn branch(&self) -> u32 {
        self.0.first().copied().unwrap_or(0)
    }
}

/// Returns the image's library, if it is to be opened, and the libraries to open before it.
pub(crate) fn library() -> Option<(CString, Vec<CString>)> {
    let files = regular_files(Path::new(COMPAT_DIR))?;
    let (path, version) = sole_libcuda(&files)?;
    let kernel = Path::new(DRIVER_PROC_DIR);
    let driver = parse_kernel_driver(&fs::read_to_string(kernel.join("version")).ok()?)?;
    let models = gpu_models(&kernel.join("gpus"))?;
    let branches = supported_branches(path);
    if !is_compatible(&driver, &models, &version, branches.as_deref()) {
        return None;
    }
    let text = |path: &PathBuf| CString::new(path.clone().into_os_string().into_vec()).ok();
    let named =
        |path: &&PathBuf| file_name(path).is_some_and(|name| name.starts_with(HELPER_PREFIX));
    Some((
        text(path)?,
        files.iter().filter(named).filter_map(text).collect(),
    ))
}

/// Applies the rule above. `branches` are those of the library's note.
fn is_compatible(
    driver: &Version,
    models: &[String],
    library: &Version,
    branches: Option<&[u32]>,
) -> bool {
    let consumer = |model: &String| model.contains("GeForce") || model.contains("TITAN");
    let supported = !models.is_empty() && !models.iter().any(consumer);
    let newer = match branches {
        Some(branches) => branches.contains(&driver.branch()) && library > driver,
        None => library.branch() > driver.branch(),
    };
    supported && newer
}

/// Returns the folder's only `libcuda`. Of two, the right one is unknown.
fn sole_libcuda(files: &[PathBuf]) -> Option<(&PathBuf, Version)> {
    let version = |path: &PathBuf| Version::parse(file_name(path)?.strip_prefix(LIBCUDA_PREFIX)?);
    let mut found = files.iter().filter_map(|path| Some((path, version(path)?)));
    found.next().filter(|_| found.next().is_none())
}

/// Lists the files of a folder that are not links.
fn regular_files(folder: &Path) -> Option<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let regular = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    Some(regular.map(|entry| entry.path()).collect())
}

fn file_name(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

/// Parses `580.95.05` of `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  ...`.
fn parse_kernel_driver(text: &str) -> Option<Version> {
    text.lines()
        .next()?
        .split_whitespace()
        .find_map(Version::parse)
}

/// Returns the product names of all GPUs, or `None` if one cannot be read.
fn gpu_models(gpus: &Path) -> Option<Vec<String>> {
    let model = |gpu: fs::DirEntry| {
        let text = fs::read_to_string(gpu.path().join("information")).ok()?;
        let name = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
        Some(name.trim().to_owned())
    };
    fs::read_dir(gpus)
        .ok()?
        .map(|gpu| gpu.ok().and_then(model))
        .collect()
}

/// Returns the branches of the kernel driver in the library's note, or `None` without a note.
fn supported_branches(library: &Path) -> Option<Vec<u32>> {
    let file = ReadCache::new(File::open(library).ok()?);
    let endian = LittleEndian;
    let header = FileHeader64::<LittleEndian>::parse(&file).ok()?;
    let sections = header.sections(endian, &file).ok()?;
    let (_, section) = sections.section_by_name(endian, b".note.cuda.fwd_compatibility")?;
    let mut notes = section.notes(endian, &file).ok()??;
    let note = notes.next().ok()??;
    let is_nvidia = note.name() == b"NVIDIA Corporation";
    is_nvidia.then(|| parse_branches(note.desc()).unwrap_or_default())
}

/// Parses `[535, 550]` of `{"format":1,"CUDA version":"12.9","driver":[535,550],"device":[1,2]}`.
fn parse_branches(description: &[u8]) -> Option<Vec<u32>> {
    let text: String = std::str::from_utf8(description)
        .ok()?
        .split_whitespace()
        .collect();
    let (_, rest) = text.split_once("\"driver\":[")?;
    let (numbers, _) = rest.split_once(']')?;
    numbers
        .split(',')
        .map(|number| number.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> Version {
        Version::parse(text).unwrap()
    }

    fn allowed(driver: &str, library: &str, branches: Option<&[u32]>, model: &str) -> bool {
        let models = [model.to_owned()];
        is_compatible(&version(driver), &models, &version(library), branches)
    }

    #[test]
    fn library_without_a_note_is_opened_when_its_branch_is_newer() {
        let opened = |driver, library| allowed(driver, library, None, "NVIDIA H200");
        assert!(opened("535.104.05", "550.54.15"));
        assert!(opened("99.55.66", "222.88.99"), "numbers, not text");
        assert!(!opened("550.54.14", "550.54.15"), "the same branch");
        assert!(!opened("580.95.05", "550.54.15"), "an older one");
    }

    #[test]
    fn library_with_a_note_is_opened_on_listed_older_drivers() {
        let note: &[u32] = &[535, 550, 570, 575];
        let opened = |driver| allowed(driver, "575.57.08", Some(note), "NVIDIA H200");
        assert!(opened("570.211.01"));
        assert!(opened("575.10.10"), "the same branch, and older");
        assert!(!opened("575.57.08"), "the same");
        assert!(!opened("575.99.99"), "newer");
        assert!(!opened("560.35.03"), "not listed, though older");
        assert!(!opened("590.44.01"));
        assert!(!allowed("535.1.1", "575.57.08", Some(&[]), "NVIDIA H200"));
    }

    #[test]
    fn host_library_is_opened_on_consumer_cards() {
        let opened = |model| allowed("535.104.05", "550.54.15", None, model);
        for model in [
            "NVIDIA H200",
            "Tesla T4",
            "NVIDIA A100-SXM4-80GB",
            "Quadro RTX 6000",
        ] {
            assert!(opened(model), "{model}");
        }
        for model in [
            "NVIDIA GeForce RTX 4090",
            "GeForce GTX 1080",
            "NVIDIA TITAN RTX",
        ] {
            assert!(!opened(model), "{model}");
        }
        let mixed = ["NVIDIA H200", "NVIDIA GeForce RTX 4090"].map(str::to_owned);
        let (driver, library) = (version("535.1.1"), version("550.1.1"));
        assert!(!is_compatible(&driver, &mixed, &library, None));
        assert!(
            !is_compatible(&driver, &[], &library, None),
            "no GPU is known"
        );
    }

    #[test]
    fn driver_version_is_parsed_from_both_kinds_of_module() {
        for (text, found) in [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  12.2.0\n",
                Some("535.104.05"),
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@build)\n",
                Some("580.95.05"),
            ),
            ("something else\nGCC version: 12.2.0\n", None),
            ("", None),
        ] {
            assert_eq!(parse_kernel_driver(text), found.map(version), "{text}");
        }
    }

    #[test]
    fn no_library_is_chosen_when_the_folder_has_two() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let chosen = || {
            let files = regular_files(path).unwrap();
            sole_libcuda(&files).map(|(path, version)| (path.clone(), version))
        };
        assert_eq!(chosen(), None);
        fs::write(path.join("libcuda.so.550.54.15"), "").unwrap();
        fs::write(path.join("libnvidia-nvvm.so.550.54.15"), "").unwrap();
        std::os::unix::fs::symlink("libcuda.so.550.54.15", path.join("libcuda.so.1.1")).unwrap();
        assert_eq!(
            chosen(),
            Some((path.join("libcuda.so.550.54.15"), version("550.54.15")))
        );
        fs::write(path.join("libcuda.so.560.35.03"), "").unwrap();
        assert_eq!(chosen(), None);
    }

    #[test]
    fn broken_note_lists_no_branches() {
        let note = br#"{"format":1,"CUDA version":"12.9","driver":[535,550,575],"device":[1,2,7]}"#;
        assert_eq!(parse_branches(note), Some(vec![535, 550, 575]));
        assert_eq!(
            parse_branches(br#"{ "driver" : [ 535 ] }"#),
            Some(vec![535])
        );
        for broken in [
            &b"{}"[..],
            br#"{"driver":[535"#,
            br#"{"driver":[a]}"#,
            b"\xff",
        ] {
            assert_eq!(parse_branches(broken), None);
        }
    }

    #[test]
    fn gpu_models_fail_when_one_gpu_cannot_be_read() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(gpu_models(&folder.path().join("gone")), None);
        let gpu = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("information"), text).unwrap();
        };
        gpu("0000:01:00.0", "Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\n");
        assert_eq!(
            gpu_models(folder.path()),
            Some(vec!["NVIDIA H200".to_owned()])
        );
        gpu("0000:02:00.0", "IRQ:   \t\t 17\n");
        assert_eq!(gpu_models(folder.path()), None);
    }
}
