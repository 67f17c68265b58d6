//! Finds the driver's files in a process's memory map: pure.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use bursar_node::cdi::CONTAINER_DRIVER_DIR;

/// A mapped file of a driver.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MappedFile {
    /// The kind of file, by its name.
    pub kind: FileKind,
    /// The file's inode.
    pub inode: u64,
    /// The path in the process's mount namespace. The kernel appends ` (deleted)` to a removed
    /// file.
    pub path: PathBuf,
}

/// The kind of a mapped file, by its name alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileKind {
    /// A file with the name of the driver API library: the shim's entry, or another library.
    Libcuda,
    /// The driver's own library, at the path where the agent mounts it.
    Driver,
    /// A device node, through which processes use the GPU.
    Device,
}

/// The most bytes of paths that are stored for a process. An honest one has a dozen files.
const MAX_PATH_BYTES: usize = 64 << 10;

/// The driver's files in a memory map, each once.
#[derive(Clone, Debug, Default)]
pub struct DriverFiles {
    files: BTreeSet<MappedFile>,
    bytes: usize,
}

impl DriverFiles {
    /// Adds a line of `/proc/<pid>/maps` (proc_pid_maps(5)).
    pub fn add_line(&mut self, line: &str) {
        let Some(file) = parse_line(line).filter(|_| self.bytes <= MAX_PATH_BYTES) else {
            return;
        };
        let bytes = file.path.as_os_str().len();
        if self.files.insert(file) {
            self.bytes += bytes;
        }
    }

    /// The files; none where they are too many.
    pub fn get(&self) -> Option<&BTreeSet<MappedFile>> {
        (self.bytes <= MAX_PATH_BYTES).then_some(&self.files)
    }
}

/// The most mappings of device nodes that are stored for a process; a context of an H200 has
/// thirty.
const MAX_DEVICE_MAPPINGS: usize = 256;

/// Adds the address at which a line of a memory map has a device node of the driver. A process
/// without any has not initialised the driver; NVML maps none.
pub(crate) fn add_device_mapping(line: &str, devices: &mut BTreeSet<u64>) {
    let path = line.find('/').and_then(|at| line.get(at..));
    if path.and_then(kind_of) != Some(FileKind::Device) || devices.len() >= MAX_DEVICE_MAPPINGS {
        return;
    }
    let start = line.split_once('-').map(|(start, _)| start);
    devices.extend(start.and_then(|start| u64::from_str_radix(start, 16).ok()));
}

/// The node through which the driver maps managed memory.
const UVM_NODE: &str = "/dev/nvidia-uvm";

/// The bytes of a line that maps managed memory; none for other lines. Managed memory exists only
/// as long as its mapping does (`uvm_mmap`).
pub(crate) fn managed_bytes(line: &str) -> Option<u64> {
    let path = line.find('/').and_then(|at| line.get(at..))?;
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    if path != UVM_NODE {
        return None;
    }
    let number = |text| u64::from_str_radix(text, 16).ok();
    number(end)?.checked_sub(number(start)?)
}

/// `7f00-7f01 r-xp 00000000 08:01 1234 /usr/lib/libcuda.so.1`: range, access, offset, device,
/// inode, path.
fn parse_line(line: &str) -> Option<MappedFile> {
    let path = &line[line.find('/')?..];
    let kind = kind_of(path)?;
    let inode = line.split_ascii_whitespace().nth(4)?.parse().ok()?;
    Some(MappedFile {
        kind,
        inode,
        path: path.into(),
    })
}

fn kind_of(path: &str) -> Option<FileKind> {
    if path.starts_with("/dev/nvidia") {
        return Some(FileKind::Device);
    }
    let path = Path::new(path);
    let name = path.file_name()?.to_str()?;
    if name.starts_with("libcuda.so") {
        Some(FileKind::Libcuda)
    } else if name.starts_with("cuda.so") && path.starts_with(CONTAINER_DRIVER_DIR) {
        Some(FileKind::Driver)
    } else {
        None
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn files(maps: &str) -> BTreeSet<MappedFile> {
        let mut files = DriverFiles::default();
        maps.lines().for_each(|line| files.add_line(line));
        files.get().unwrap().clone()
    }

    const MAPS: &str = "\
55d0c6a00000-55d0c6a21000 r--p 00000000 08:01 131 /usr/bin/python3.12
55d0c7a00000-55d0c7a21000 rw-p 00000000 00:00 0 [heap]
7f1000000000-7f1000001000 r--p 00000000 08:01 4711 /opt/bursar/lib/libcuda.so.1
7f1000001000-7f1000002000 r-xp 00001000 08:01 4711 /opt/bursar/lib/libcuda.so.1
7f2000000000-7f2000001000 r-xp 00000000 08:01 815 /opt/bursar/drv/cuda.so.1
7f2100000000-7f2100001000 rw-s 00000000 00:05 77 /dev/nvidiactl
7f2200000000-7f2200001000 rw-s 00000000 00:05 78 /dev/nvidia0
7f3000000000-7f3000001000 r-xp 00000000 00:3b 9 /tmp/x/libcuda.so.580.95.05 (deleted)
7f3000000000-7f3000001000 r-xp 00000000 00:3b 10 /usr/lib/libcudart.so.12
7f4000000000-7f4000001000 rw-s 00000000 00:01 12 /memfd:bursar-credit (deleted)
7fffd0000000-7fffd0021000 rw-p 00000000 00:00 0
7fffd0000000-7fffd0021000 r-xp 00000000 00:00 0 [vdso]
";

    #[test]
    fn driver_files_are_found_once_each() {
        let found: Vec<_> = files(MAPS)
            .into_iter()
            .map(|file| (file.kind, file.inode, file.path.display().to_string()))
            .collect();
        let expected = [
            (
                FileKind::Libcuda,
                9,
                "/tmp/x/libcuda.so.580.95.05 (deleted)",
            ),
            (FileKind::Libcuda, 4711, "/opt/bursar/lib/libcuda.so.1"),
            (FileKind::Driver, 815, "/opt/bursar/drv/cuda.so.1"),
            (FileKind::Device, 77, "/dev/nvidiactl"),
            (FileKind::Device, 78, "/dev/nvidia0"),
        ]
        .map(|(kind, inode, path)| (kind, inode, path.to_owned()));
        assert_eq!(found, expected);
    }

    #[test]
    fn device_mappings_are_known_by_address() {
        let mut devices = BTreeSet::new();
        MAPS.lines()
            .for_each(|line| add_device_mapping(line, &mut devices));
        assert_eq!(devices, [0x7f21_0000_0000, 0x7f22_0000_0000].into());
    }

    #[test]
    fn managed_bytes_are_those_of_mappings_of_the_uvm_node() {
        let line = |access, path| format!("7f0000000000-7f0040000000 {access} 0 00:05 79 {path}");
        assert_eq!(managed_bytes(&line("rw-s", UVM_NODE)), Some(1 << 30));
        assert_eq!(managed_bytes(&line("---s", UVM_NODE)), Some(1 << 30));
        for other in [
            line("rw-s", "/dev/nvidia-uvm-tools"),
            line("rw-s", "/tmp/dev/nvidia-uvm"),
            line("rw-s", ""),
            format!("7f01-7f00 rw-s 0 00:05 79 {UVM_NODE}"),
            format!("x-y rw-s 0 00:05 79 {UVM_NODE}"),
            String::new(),
        ] {
            assert_eq!(managed_bytes(&other), None, "{other}");
        }
    }

    #[test]
    fn file_is_no_driver_when_only_its_folder_prefix_matches() {
        assert_eq!(kind_of("/opt/bursar/drv/cuda.so.1"), Some(FileKind::Driver));
        assert_eq!(kind_of("/opt/bursar/drv2/cuda.so.1"), None);
        assert_eq!(kind_of("/home/a b/libcuda.so"), Some(FileKind::Libcuda));
    }

    #[test]
    fn driver_files_are_bounded() {
        let mut files = DriverFiles::default();
        for number in 0..65_000 {
            files.add_line(&format!(
                "7f00-7f01 r-xp 0 08:01 {number} /tmp/{number}/libcuda.so.1"
            ));
        }
        assert!(files.get().is_none());
        assert!(files.bytes < 2 * MAX_PATH_BYTES, "{}", files.bytes);
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "\\PC{0,100}\n?/?\\PC{0,40}(libcuda.so)?") {
            let _ = files(&text);
            let _ = managed_bytes(&text);
        }
    }
}
