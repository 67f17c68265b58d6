//! Finds XIDs that name a process in the kernel's log.
//!
//! NVML's events say which GPU, not which process; the driver's records in `/dev/kmsg` do, in the host's pid namespace:
//! `4,1234,567890,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python, Ch 00000008, ...`.
//!
//! Tenants get text into the log as well: the kernel reports a crash with the program's name, which can *begin* with
//! `NVRM: Xid (PCI:` (15 letters), and with the name of its file. So the driver's text must begin the record, with a
//! whole address in it, and what a program wrote to `/dev/kmsg` decides nothing. [`super::belief`] asks NVML as well.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::str::FromStr;

use rustix::fs::OFlags;

use crate::gpu::pci::PciAddress;
use crate::gpu::xid::loses_context;
use crate::ledger::Moment;

/// A record of `/dev/kmsg` is no longer (printk.c, `PRINTK_MESSAGE_MAX`); of another file, what is read at once.
const LONGEST: usize = 8192;

/// The facility of what the kernel writes; it gives no other text that one (printk.c, `devkmsg_write`).
const KERNEL: u64 = 0;

/// How much is read at most in one go: a log that floods must not hold up its reader.
const MOST_RECORDS: usize = 1024;

/// An XID and the process that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// The GPU.
    pub gpu: PciAddress,
    /// The code.
    pub xid: u32,
    /// The process, in the host's pid namespace.
    pub pid: u32,
}

/// A record of `/dev/kmsg`: `<facility and level>,<number>,<microseconds>,<flags>[,...];<text>` (the kernel's
/// `Documentation/ABI/testing/dev-kmsg`).
struct Record<'a> {
    facility: u64,
    /// By a clock of the kernel's own, which stands still while the machine sleeps and drifts from every other.
    micros: u64,
    text: &'a str,
}

impl<'a> Record<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (header, text) = line.split_once(';')?;
        let mut fields = header.split(',');
        let prefix: u64 = number(fields.next()?)?;
        let _: u64 = number(fields.next()?)?;
        let micros = number(fields.next()?)?;
        fields.next()?;
        Some(Self {
            facility: prefix >> 3,
            micros,
            text,
        })
    }
}

/// The XID of a context and its process, if the driver's text of a record tells of one.
fn named(text: &str) -> Option<Named> {
    let rest = text.strip_prefix("NVRM: Xid (")?;
    let (gpu, rest) = rest.split_once("): ")?;
    let (code, rest) = rest.split_once(", pid=")?;
    // An unknown process is `'<unknown>'`.
    let pid = rest.split([',', '\n']).next()?;
    let named = Named {
        gpu: Some(gpu)
            .filter(|gpu| gpu.starts_with("PCI:"))?
            .parse()
            .ok()?,
        xid: number(code)?,
        pid: number(pid)?,
    };
    loses_context(named.xid).then_some(named)
}

/// A number of decimal digits, which has no sign.
fn number<T: FromStr>(text: &str) -> Option<T> {
    let is_decimal = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_decimal)
}

/// The XID of a context and its process, if a line of the log tells of one; when, in the log's microseconds.
pub fn parse(line: &str) -> Option<(Named, u64)> {
    let record = Record::parse(line)?;
    let is_kernels = record.facility == KERNEL;
    Some((named(record.text)?, record.micros)).filter(|_| is_kernels)
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

    /// The XIDs of contexts since the last call, each with a moment that it was no later than, and whether there is
    /// nothing more to read. What the kernel has overwritten meanwhile is lost.
    pub fn read(&mut self, now: Moment) -> (Vec<(Named, Moment)>, bool) {
        let (mut named, mut newest) = (Vec::new(), 0);
        let is_whole = self.read_lines(|line| {
            newest = newest.max(Record::parse(line).map_or(0, |record| record.micros));
            named.extend(parse(line));
        });
        // The log's clock says how far apart records are; the newest of these was written before now.
        let at = |micros: u64| Moment(now.0.saturating_sub((newest - micros) / 1_000));
        let named = named.into_iter().map(|(named, micros)| (named, at(micros)));
        (named.collect(), is_whole)
    }

    fn read_lines(&mut self, mut take: impl FnMut(&str)) -> bool {
        let mut bytes = [0; LONGEST];
        for _ in 0..MOST_RECORDS {
            let read = match self.file.read(&mut bytes) {
                Ok(0) => return true,
                Ok(read) => read,
                // EPIPE: records were overwritten; the next read goes on behind them.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => continue,
                Err(_) => return true,
            };
            self.begun
                .extend_from_slice(bytes.get(..read).unwrap_or_default());
            while let Some(end) = self.begun.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.begun.drain(..=end).collect();
                take(&String::from_utf8_lossy(&line));
            }
            self.begun.truncate(LONGEST);
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
        parse(&format!("{HEADER}{text}")).map(|(Named { xid, pid, .. }, _)| (xid, pid))
    }

    #[test]
    fn a_fault_of_a_context_is_found_with_the_pid_that_it_names() {
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
    fn the_line_says_which_gpu_it_was() {
        for said in ["PCI:0000:3b:00", "PCI:0000:3B:00.0", "PCI:00000000:3b:00"] {
            let line = format!("{HEADER}NVRM: Xid ({said}): 31, pid=5");
            let (named, _) = parse(&line).unwrap();
            assert_eq!(named.gpu, "00000000:3B:00.0".parse().unwrap(), "{said}");
        }
    }

    #[test]
    fn a_name_that_a_tenant_chose_decides_nothing_in_a_record() {
        let said = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=x";
        for text in [
            format!(
                "NVRM: Xid (PCI:[6895]: segfault at 0 ip 0 sp 0 error 6 in {said}[1132,55+1000]"
            ),
            format!("python3[6895]: segfault at 0 ip 0 sp 0 error 6 in {said}[1132,55+1000]"),
            format!("NVRM: Xid (0000[1]: segfault at 0 ip 0 sp 0 error 6 in {said}[1132,55+1000]"),
        ] {
            assert_eq!(parse(&format!("6,6436,1,-;{text}\n")), None, "{text}");
        }
        assert_eq!(
            parse(&format!("14,6436,1,-;{said}\n")),
            None,
            "a program wrote it"
        );
        assert_eq!(parse(said), None, "no record");
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
    fn only_what_is_written_after_the_log_was_opened_counts_and_a_line_counts_when_it_is_whole() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let line =
            |pid: u32| format!("{HEADER}NVRM: Xid (PCI:0000:01:00): 31, pid={pid}, name=a\n");
        let now = Moment(5);
        write!(file, "{}", line(1)).unwrap();
        let mut log = Log::open(file.path()).unwrap();
        assert_eq!(log.read(now), (vec![], true));
        let (begin, end) = (&line(2)[..40], &line(2)[40..]);
        write!(file, "{}{begin}", line(3)).unwrap();
        let pids = |log: &mut Log| {
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
    fn records_read_together_are_as_far_apart_as_their_stamps_say() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut log = Log::open(file.path()).unwrap();
        let xid = "NVRM: Xid (PCI:0000:01:00): 31, pid=4, name=a";
        // A machine whose log is a day behind the clock that counts its sleep.
        for (micros, text) in [
            (1_000_000, xid),
            (3_500_000, xid),
            (4_000_000, "usb 1-1: x"),
        ] {
            writeln!(file, "4,1,{micros},-;{text}").unwrap();
        }
        let (named, _) = log.read(Moment(86_400_000));
        let at: Vec<u64> = named.into_iter().map(|(_, at)| at.0).collect();
        assert_eq!(at, [86_397_000, 86_399_500]);
    }

    #[test]
    fn a_log_that_floods_is_read_in_parts_and_its_end_is_known() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut log = Log::open(file.path()).unwrap();
        let line = "x".repeat(LONGEST - 1) + "\n";
        for _ in 0..=MOST_RECORDS {
            file.write_all(line.as_bytes()).unwrap();
        }
        let xid = "NVRM: Xid (PCI:0000:01:00): 31, pid=4, name=a";
        writeln!(file, "{HEADER}{xid}").unwrap();
        assert_eq!(log.read(Moment(5)), (vec![], false));
        let (named, is_whole) = log.read(Moment(5));
        assert_eq!((named.len(), is_whole), (1, true));
    }
}
