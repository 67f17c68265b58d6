//! Adds the families that every Prometheus client reports of its process: growth of memory and
//! descriptors over months shows there, and nowhere else.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

/// The last line of a page.
const END: &str = "# EOF\n";

/// Adds `process_*` of this process, which began at `start`, to a page of OpenMetrics, without
/// figures that cannot be read.
pub(crate) fn add_to(page: &mut String, start: SystemTime) {
    if page.ends_with(END) {
        page.truncate(page.len() - END.len());
    }
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    let cpu = cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9;
    let start = start.duration_since(UNIX_EPOCH).ok();
    let limit = getrlimit(Resource::Nofile).current;
    for (name, kind, help, value) in [
        ("cpu_seconds", "counter", "Processor time", Some(cpu)),
        (
            "resident_memory_bytes",
            "gauge",
            "Memory in RAM",
            resident_bytes(),
        ),
        ("open_fds", "gauge", "Open file descriptors", open_files()),
        (
            "max_fds",
            "gauge",
            "Limit of file descriptors",
            limit.map(|limit| limit as f64),
        ),
        (
            "start_time_seconds",
            "gauge",
            "Start of the process, as Unix time",
            start.map(|start| start.as_secs_f64()),
        ),
    ] {
        let Some(value) = value else { continue };
        let sample = if kind == "counter" { "_total" } else { "" };
        let _ = write!(
            page,
            "# HELP process_{name} {help}.\n# TYPE process_{name} {kind}\nprocess_{name}{sample} {value}\n"
        );
    }
    page.push_str(END);
}

/// The second field of `statm`, proc(5), has the resident pages.
fn resident_bytes() -> Option<f64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: f64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * page_size() as f64)
}

/// One descriptor is that of this look.
fn open_files() -> Option<f64> {
    let open = std::fs::read_dir("/proc/self/fd").ok()?;
    Some(open.count().saturating_sub(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_has_the_process_before_its_end() {
        let mut page = "# HELP a B.\n# TYPE a gauge\na 1\n# EOF\n".to_owned();
        let start = UNIX_EPOCH + std::time::Duration::from_millis(1_500);
        add_to(&mut page, start);
        assert!(page.starts_with("# HELP a B.\n"), "{page}");
        assert_eq!(page.matches(END).count(), 1);
        assert!(
            page.ends_with("process_start_time_seconds 1.5\n# EOF\n"),
            "{page}"
        );
        let value = |name: &str| {
            let line = page.lines().find_map(|line| line.strip_prefix(name));
            let value = line.and_then(|line| line.trim().parse::<f64>().ok());
            value.unwrap_or_else(|| panic!("{name} in {page}"))
        };
        assert!(value("process_cpu_seconds_total") > 0.0);
        assert!(value("process_resident_memory_bytes") > 1e6);
        let before = value("process_open_fds");
        assert!(before >= 3.0 && before < value("process_max_fds"));
    }
}
