//! Writes the log as comma-separated values that RMM's `replay` reads.
//!
//! RMM 26.10 (`cpp/benchmarks/utilities/log_parser.hpp`) finds columns by name. Thread and Size are
//! decimal, Pointer is hexadecimal or `(nil)`, Action is one of three words. `replay` refuses any
//! stream but the default one, so Stream is always 0. The column `StreamKey` has the stream.
#![forbid(unsafe_code)]

use std::fmt;
use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::UNIX_EPOCH;

use super::{Action, LogRecord, Sink};

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream,StreamKey,Tag";

struct State<W> {
    out: W,
    failed: Option<io::Error>,
}

/// Sink that writes lines to a writer, which should be buffered.
pub struct CsvSink<W>(Mutex<State<W>>);

impl<W> fmt::Debug for CsvSink<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Csv")
    }
}

impl<W: Write + Send> CsvSink<W> {
    /// Writes the header line.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn new(mut out: W) -> io::Result<Self> {
        writeln!(out, "{HEADER}")?;
        Ok(CsvSink(Mutex::new(State { out, failed: None })))
    }

    /// Flushes the writer. After the first write error the sink has written nothing more.
    ///
    /// # Errors
    /// The first error of the writer.
    pub fn flush(&self) -> io::Result<()> {
        let mut state = self.lock();
        match state.failed.take() {
            Some(error) => Err(error),
            None => state.out.flush(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<W>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W: Write + Send> Sink for CsvSink<W> {
    fn write(&self, event: LogRecord) {
        let mut state = self.lock();
        if state.failed.is_none() {
            state.failed = writeln!(state.out, "{}", CsvLine(&event)).err();
        }
    }
}

struct CsvLine<'a>(&'a LogRecord);

impl fmt::Display for CsvLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LogRecord {
            time,
            thread,
            action,
            address,
            bytes,
            stream,
            tag,
        } = self.0;
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (seconds, micros) = (since.as_secs() % 86_400, since.subsec_micros());
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        write!(f, "{thread},{hour:02}:{minute:02}:{second:02}.{micros:06},")?;
        f.write_str(match action {
            Action::Allocate => "allocate",
            Action::AllocateFailure => "allocate failure",
            Action::Free => "free",
        })?;
        match address {
            0 => f.write_str(",(nil)")?,
            address => write!(f, ",{address:#x}")?,
        }
        // RFC 4180 doubles a quote inside quotes.
        let tag = tag.0.replace('"', "\"\"");
        write!(f, ",{bytes},0,{},\"{tag}\"", stream.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::StreamKey;
    use crate::resource::Tag;
    use std::time::Duration;

    #[test]
    fn line_has_the_columns_that_rmm_replay_reads() {
        let event = LogRecord {
            time: UNIX_EPOCH + Duration::new(86_400 + 3661, 1_234_000),
            thread: 3,
            action: Action::Allocate,
            address: 0x7f00_0000_0100,
            bytes: 1024,
            stream: StreamKey::default_of(0),
            tag: Tag("a \"quoted\", tag"),
        };
        let expected =
            "3,01:01:01.001234,allocate,0x7f0000000100,1024,0,0,\"a \"\"quoted\"\", tag\"";
        assert_eq!(CsvLine(&event).to_string(), expected);
        let failed = LogRecord {
            action: Action::AllocateFailure,
            address: 0,
            ..event
        };
        assert!(
            CsvLine(&failed)
                .to_string()
                .contains(",allocate failure,(nil),1024,0,")
        );
    }

    #[derive(Debug)]
    struct FakeFullDisk;

    impl Write for FakeFullDisk {
        fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
            if buffer.starts_with(b"Thread") || buffer == b"\n" {
                Ok(buffer.len())
            } else {
                Err(io::ErrorKind::StorageFull.into())
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn flush_returns_the_error_of_an_earlier_write() {
        let csv = CsvSink::new(FakeFullDisk).expect("the header is taken");
        csv.write(LogRecord {
            time: UNIX_EPOCH,
            thread: 1,
            action: Action::Free,
            address: 1,
            bytes: 1,
            stream: StreamKey::default_of(0),
            tag: Tag::default(),
        });
        assert_eq!(
            csv.flush().map_err(|error| error.kind()),
            Err(io::ErrorKind::StorageFull)
        );
    }
}
