//! Finds XIDs that name a process in the kernel's log.
//!
//! NVML's events say which GPU, not which process; the driver's lines in `/dev/kmsg` do, in the host's pid namespace:
//! `NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python, Ch 00000008, ...`.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

use crate::inventory::pci::PciAddress;
use crate::inventory::xid::loses_context;

/// A record of `/dev/kmsg` is no longer (printk.c, `PRINTK_MESSAGE_MAX`); of another file, what is read at once.
const LONGEST: usize = 8192;

/// How much is read at most in one go: a log that floods must not hold up its reader.
const MOST_RECORDS: usize = 1024;

/// An XID and the process that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// The GPU, where the line says which.
    pub gpu: Option<PciAddress>,
    /// The code.
    pub xid: u32,
    /// The process, in the host's pid namespace.
    pub pid: u32,
}

/// The XID of a context and its process, if a line of the log tells of one.
pub fn parse(line: &str) -> Option<Named> {
    let (_, rest) = line.split_once("NVRM: Xid (")?;
    let (gpu, rest) = rest.split_once("): ")?;
    let (code, rest) = rest.split_once(',')?;
    let pid = rest.trim_start().strip_prefix("pid=")?;
    // Drivers before 450 wrote the number alone; an unknown process is `'<unknown>'`.
    let digits = pid.split(|letter: char| !letter.is_ascii_digit()).next()?;
    let named = Named {
        gpu: gpu.parse().ok(),
        xid: code.trim().parse().ok()?,
        pid: digits.parse().ok()?,
    };
    loses_context(named.xid).then_some(named)
}

/// The log, from its end on.
#[derive(Debug)]
pub struct Log {
    file: File,
    /// The begin of a line whose end was not read yet.
    begun: Vec<u8>,
}

impl Log {
    /// Opens it, for reads that wait for nothing.
    ///
    /// # Errors
    /// What the system says: none where the agent may not read it.
    pub fn open(path: &Path) -> io::Result<Log> {
        let flags = OFlags::NONBLOCK.bits();
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(i32::try_from(flags).unwrap_or_default())
            .open(path)?;
        file.seek(SeekFrom::End(0))?;
        let begun = Vec::new();
        Ok(Log { file, begun })
    }

    /// The XIDs of contexts since the last call, and whether there is nothing more to read. What the kernel has
    /// overwritten meanwhile is lost.
    pub fn read(&mut self) -> (Vec<Named>, bool) {
        let (mut named, mut bytes) = (Vec::new(), [0; LONGEST]);
        for _ in 0..MOST_RECORDS {
            let read = match self.file.read(&mut bytes) {
                Ok(0) => return (named, true),
                Ok(read) => read,
                // EPIPE: records were overwritten; the next read goes on behind them.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => continue,
                Err(_) => return (named, true),
            };
            self.begun
                .extend_from_slice(bytes.get(..read).unwrap_or_default());
            while let Some(end) = self.begun.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.begun.drain(..=end).collect();
                named.extend(parse(&String::from_utf8_lossy(&line)));
            }
            self.begun.truncate(LONGEST);
        }
        (named, false)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn named(line: &str) -> Option<(u32, u32)> {
        parse(line).map(|Named { xid, pid, .. }| (xid, pid))
    }

    #[test]
    fn a_fault_of_a_context_is_found_with_the_pid_that_it_names() {
        let kmsg = "4,1234,567890,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python3, Ch 00000008, intr 00000000. \
            MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f45_00000000.";
        assert_eq!(named(kmsg), Some((31, 4711)));
        let old = "NVRM: Xid (PCI:0000:01:00): 13, pid=77, Graphics SM Warp Exception";
        assert_eq!(named(old), Some((13, 77)));
        assert_eq!(
            named("NVRM: Xid (PCI:0000:01:00): 43, pid=5"),
            Some((43, 5))
        );
    }

    #[test]
    fn the_line_says_which_gpu_it_was() {
        for said in ["PCI:0000:3b:00", "0000:3b:00", "PCI:0000:3B:00.0"] {
            let named = parse(&format!("NVRM: Xid ({said}): 31, pid=5")).unwrap();
            assert_eq!(named.gpu, "00000000:3B:00.0".parse().ok(), "{said}");
            assert!(named.gpu.is_some());
        }
        let odd = parse("NVRM: Xid (bus nine): 31, pid=5").unwrap();
        assert_eq!(odd.gpu, None);
    }

    #[test]
    fn what_names_no_process_or_is_not_of_a_context_is_nobodys() {
        for line in [
            "",
            "usb 1-1: new device",
            "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:01:00): 79, pid=4711, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:01:00): 31, pid='<unknown>', name=<unknown>, Ch 00000010",
            "NVRM: Xid (PCI:0000:01:00): 63, pid=4711, Row Remapper: New row marked for remapping",
            "NVRM: Xid (PCI:0000:01:00): , pid=4711",
            "NVRM: Xid (PCI:0000:01:00",
        ] {
            assert_eq!(named(line), None, "{line}");
        }
    }

    #[test]
    fn only_what_is_written_after_the_log_was_opened_counts_and_a_line_counts_when_it_is_whole() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let line = |pid: u32| format!("NVRM: Xid (PCI:0000:01:00): 31, pid={pid}, name=a\n");
        write!(file, "{}", line(1)).unwrap();
        let mut log = Log::open(file.path()).unwrap();
        assert_eq!(log.read(), (vec![], true));
        let (begin, end) = (&line(2)[..40], &line(2)[40..]);
        write!(file, "{}{begin}", line(3)).unwrap();
        let pids = |log: &mut Log| {
            let (named, _) = log.read();
            named.into_iter().map(|named| named.pid).collect::<Vec<_>>()
        };
        assert_eq!(pids(&mut log), [3]);
        write!(file, "{end}").unwrap();
        assert_eq!(pids(&mut log), [2]);
        assert_eq!(log.read(), (vec![], true));
    }

    #[test]
    fn a_log_that_floods_is_read_in_parts_and_its_end_is_known() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut log = Log::open(file.path()).unwrap();
        let line = "x".repeat(LONGEST - 1) + "\n";
        for _ in 0..=MOST_RECORDS {
            file.write_all(line.as_bytes()).unwrap();
        }
        writeln!(file, "NVRM: Xid (PCI:0000:01:00): 31, pid=4, name=a").unwrap();
        assert_eq!(log.read(), (vec![], false));
        let (named, is_whole) = log.read();
        assert_eq!((named.len(), is_whole), (1, true));
    }
}
