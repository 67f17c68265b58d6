//! Finds XIDs that name a process in the kernel's log.
//!
//! NVML's events name the GPU and no process. The driver's records in `/dev/kmsg` name both, with
//! the pid in the host's pid namespace: `4,1234,567890,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=1234,
//! name=python, Ch 00000008, ...`.
//!
//! Tenants get text into the log as well. The kernel reports a crash with the program's name, which
//! can *begin* with `NVRM: Xid (PCI:` (15 letters), and with the name of its file. So the driver's
//! text must begin the record and have a complete address, and text that a program wrote to
//! `/dev/kmsg` is ignored. [`super::confirmation`] then asks NVML.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::str::FromStr;

use bursar_gpu::pci::PciAddress;
use bursar_gpu::xid::loses_context;
use bursar_ledger::BootTime;
use rustix::fs::OFlags;

/// The kernel's limit of a record (printk.c, `PRINTK_MESSAGE_MAX`), and the size of one read.
const MAX_RECORD: usize = 8192;

/// The facility of the kernel's own records; programs cannot use it (printk.c, `devkmsg_write`).
const KERNEL_FACILITY: u64 = 0;

/// The most records of one call, so that a flooded log does not block its reader.
const MAX_RECORDS_PER_READ: usize = 1024;

/// An XID with the process that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XidLine {
    /// The GPU's address.
    pub gpu: PciAddress,
    /// The XID's number.
    pub xid: u32,
    /// The process, in the host's pid namespace.
    pub pid: u32,
}

/// A record of `/dev/kmsg`: `<facility and level>,<number>,<microseconds>,<flags>[,...];<text>`
/// (the kernel's `Documentation/ABI/testing/dev-kmsg`).
struct KmsgRecord<'a> {
    facility: u64,
    /// The time of the log's own clock, which stops in suspend and drifts from every other clock.
    micros: u64,
    text: &'a str,
}

impl<'a> KmsgRecord<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (header, text) = line.split_once(';')?;
        let mut fields = header.split(',');
        let prefix: u64 = parse_decimal(fields.next()?)?;
        let _: u64 = parse_decimal(fields.next()?)?;
        let micros = parse_decimal(fields.next()?)?;
        fields.next()?;
        Some(Self {
            facility: prefix >> 3,
            micros,
            text,
        })
    }
}

/// Parses the driver's text of a record, if its XID names a process whose context is lost.
fn parse_xid(text: &str) -> Option<XidLine> {
    let rest = text.strip_prefix("NVRM: Xid (")?;
    let (gpu, rest) = rest.split_once("): ")?;
    let (code, rest) = rest.split_once(", pid=")?;
    // The driver writes `'<unknown>'` for an unknown process.
    let pid = rest.split([',', '\n']).next()?;
    let named = XidLine {
        gpu: Some(gpu)
            .filter(|gpu| gpu.starts_with("PCI:"))?
            .parse()
            .ok()?,
        xid: parse_decimal(code)?,
        pid: parse_decimal(pid)?,
    };
    loses_context(named.xid).then_some(named)
}

/// Parses a decimal number without a sign.
fn parse_decimal<T: FromStr>(text: &str) -> Option<T> {
    let is_decimal = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_decimal)
}

/// Parses a line of the log, if its XID names a process whose context is lost. The second value is
/// the record's time in the log's microseconds.
pub fn parse(line: &str) -> Option<(XidLine, u64)> {
    let record = KmsgRecord::parse(line)?;
    let is_kernels = record.facility == KERNEL_FACILITY;
    Some((parse_xid(record.text)?, record.micros)).filter(|_| is_kernels)
}

/// The kernel's log, from its end at the time of opening.
#[derive(Debug)]
pub(crate) struct KernelLog {
    file: File,
    /// The start of a line whose end was not read yet.
    partial_line: Vec<u8>,
}

impl KernelLog {
    /// Opens the log for reads that do not block.
    ///
    /// # Errors
    /// When the agent may not read the log.
    pub(crate) fn open(path: &Path) -> io::Result<KernelLog> {
        let flags = OFlags::NONBLOCK.bits();
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(i32::try_from(flags).unwrap_or_default())
            .open(path)?;
        file.seek(SeekFrom::End(0))?;
        Ok(KernelLog {
            file,
            partial_line: Vec::new(),
        })
    }

    /// Reads the records since the last call, each with a time that is not before its own, and
    /// returns whether the log has no more. Records that the kernel has overwritten are lost.
    pub(crate) fn read(&mut self, now: BootTime) -> (Vec<(XidLine, BootTime)>, bool) {
        let (mut named, mut newest) = (Vec::new(), 0);
        let is_whole = self.read_lines(|line| {
            newest = newest.max(KmsgRecord::parse(line).map_or(0, |record| record.micros));
            named.extend(parse(line));
        });
        // The log's clock gives distances between records; the newest record was written before
        // now.
        let at = |micros: u64| BootTime(now.0.saturating_sub((newest - micros) / 1_000));
        let named = named.into_iter().map(|(named, micros)| (named, at(micros)));
        (named.collect(), is_whole)
    }

    fn read_lines(&mut self, mut take: impl FnMut(&str)) -> bool {
        let mut bytes = [0; MAX_RECORD];
        for _ in 0..MAX_RECORDS_PER_READ {
            let read = match self.file.read(&mut bytes) {
                Ok(0) => return true,
                Ok(read) => read,
                // EPIPE: the kernel has overwritten records, and the next read continues after
                // these.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => continue,
                Err(_) => return true,
            };
            self.partial_line
                .extend_from_slice(bytes.get(..read).unwrap_or_default());
            while let Some(end) = self.partial_line.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.partial_line.drain(..=end).collect();
                take(&String::from_utf8_lossy(&line));
            }
            self.partial_line.truncate(MAX_RECORD);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const HEADER: &str = "4,1234,567890,-;";

    fn named(text: &str) -> Option<(u32, u32)> {
        parse(&format!("{HEADER}{text}")).map(|(XidLine { xid, pid, .. }, _)| (xid, pid))
    }

    #[test]
    fn xid_line_is_parsed_with_its_pid() {
        let kmsg = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python3, Ch 00000008, intr 00000000. \
            MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f45_00000000.\n";
        assert_eq!(named(kmsg), Some((31, 4711)));
        let old = "NVRM: Xid (PCI:0000:01:00): 13, pid=77, Graphics SM Warp Exception";
        assert_eq!(named(old), Some((13, 77)));
        assert_eq!(
            named("NVRM: Xid (PCI:0000:01:00): 43, pid=5\n"),
            Some((43, 5))
        );
        let with_caller = "4,1,2,-,caller=T9;NVRM: Xid (PCI:0000:01:00): 43, pid=5";
        assert_eq!(
            parse(with_caller).map(|(named, at)| (named.pid, at)),
            Some((5, 2))
        );
    }

    #[test]
    fn xid_line_names_its_gpu() {
        for address in ["PCI:0000:3b:00", "PCI:0000:3B:00.0", "PCI:00000000:3b:00"] {
            let line = format!("{HEADER}NVRM: Xid ({address}): 31, pid=5");
            let (named, _) = parse(&line).unwrap();
            assert_eq!(named.gpu, "00000000:3B:00.0".parse().unwrap(), "{address}");
        }
    }

    #[test]
    fn tenant_text_in_a_record_is_no_xid_line() {
        let forged = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=x";
        for text in [
            format!(
                "NVRM: Xid (PCI:[6895]: segfault at 0 ip 0 sp 0 error 6 in {forged}[1132,55+1000]"
            ),
            format!("python3[6895]: segfault at 0 ip 0 sp 0 error 6 in {forged}[1132,55+1000]"),
            format!(
                "NVRM: Xid (0000[1]: segfault at 0 ip 0 sp 0 error 6 in {forged}[1132,55+1000]"
            ),
        ] {
            assert_eq!(parse(&format!("6,6436,1,-;{text}\n")), None, "{text}");
        }
        assert_eq!(
            parse(&format!("14,6436,1,-;{forged}\n")),
            None,
            "a program wrote it"
        );
        assert_eq!(parse(forged), None, "no record");
    }

    #[test]
    fn line_is_ignored_without_pid_or_context_xid() {
        for line in [
            "",
            "usb 1-1: new device",
            "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:01:00): 79, pid=4711, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:01:00): 31, pid='<unknown>', name=<unknown>, Ch 00000010",
            "NVRM: Xid (PCI:0000:01:00): 63, pid=4711, Row Remapper: New row marked for remapping",
            "NVRM: Xid (PCI:0000:01:00): , pid=4711",
            "NVRM: Xid (PCI:0000:01:00",
            "NVRM: Xid (bus nine): 31, pid=5",
            "NVRM: Xid (0000:01:00): 31, pid=5",
            "NVRM: Xid (PCI:PCI:0000:01:00): 31, pid=5",
            "NVRM: Xid (PCI:0000:01:00): 31, pid=+5",
            "NVRM: Xid (PCI:0000:01:00): 31, pid=5 name=x",
            "NVRM: Xid (PCI:0000:01:00): 31, name=, pid=5",
            " NVRM: Xid (PCI:0000:01:00): 31, pid=5",
        ] {
            assert_eq!(named(line), None, "{line}");
        }
    }

    #[test]
    fn log_is_read_from_its_end_in_whole_lines() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let line =
            |pid: u32| format!("{HEADER}NVRM: Xid (PCI:0000:01:00): 31, pid={pid}, name=a\n");
        let now = BootTime(5);
        write!(file, "{}", line(1)).unwrap();
        let mut log = KernelLog::open(file.path()).unwrap();
        assert_eq!(log.read(now), (vec![], true));
        let (begin, end) = (&line(2)[..40], &line(2)[40..]);
        write!(file, "{}{begin}", line(3)).unwrap();
        let pids = |log: &mut KernelLog| {
            let (named, _) = log.read(now);
            named
                .into_iter()
                .map(|(named, _)| named.pid)
                .collect::<Vec<_>>()
        };
        assert_eq!(pids(&mut log), [3]);
        write!(file, "{end}").unwrap();
        assert_eq!(pids(&mut log), [2]);
        assert_eq!(log.read(now), (vec![], true));
    }

    #[test]
    fn records_are_as_far_apart_as_their_timestamps() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut log = KernelLog::open(file.path()).unwrap();
        let xid = "NVRM: Xid (PCI:0000:01:00): 31, pid=4, name=a";
        // The log's clock is a day behind the clock that counts suspend.
        for (micros, text) in [
            (1_000_000, xid),
            (3_500_000, xid),
            (4_000_000, "usb 1-1: x"),
        ] {
            writeln!(file, "4,1,{micros},-;{text}").unwrap();
        }
        let (named, _) = log.read(BootTime(86_400_000));
        let at: Vec<u64> = named.into_iter().map(|(_, at)| at.0).collect();
        assert_eq!(at, [86_397_000, 86_399_500]);
    }

    #[test]
    fn log_is_read_in_parts_when_it_floods() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut log = KernelLog::open(file.path()).unwrap();
        let line = "x".repeat(MAX_RECORD - 1) + "\n";
        for _ in 0..=MAX_RECORDS_PER_READ {
            file.write_all(line.as_bytes()).unwrap();
        }
        let xid = "NVRM: Xid (PCI:0000:01:00): 31, pid=4, name=a";
        writeln!(file, "{HEADER}{xid}").unwrap();
        assert_eq!(log.read(BootTime(5)), (vec![], false));
        let (named, is_whole) = log.read(BootTime(5));
        assert_eq!((named.len(), is_whole), (1, true));
    }
}
