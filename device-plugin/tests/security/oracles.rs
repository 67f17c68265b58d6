//! Detects broken promises of the agent while a hostile tenant runs.
//!
//! Each oracle is a pure function of the data read, so that a test can show it a violation. An
//! oracle also fails if it finds no data, because a renamed record or metric would make it pass
//! always.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use bursar_protocol::credit_page::CreditPageLayout;
use bursar_protocol::units::Units;
use serde_json::Value;

use crate::fixture::Node;

/// The quota of each container of the fixture.
pub(crate) const QUOTA: Units = Units(1 << 20);
/// The number of samples in which a thread may sleep in the same close.
const MAX_SLEEPING_SAMPLES: u32 = 4;

/// Samples the agent's state repeatedly.
#[derive(Default)]
pub(crate) struct Invariants {
    asleep: BTreeMap<PathBuf, u32>,
    /// The most that a record ever charged.
    pub(crate) max_charged: u64,
    /// The number of stacks read of the agent's runtime threads.
    pub(crate) stacks_read: u64,
}

impl Invariants {
    /// Returns the first violation.
    pub(crate) fn check(&mut self, node: &Node) -> Option<String> {
        self.check_quota(node).or_else(|| self.check_closes(node))
    }

    /// Finds a container whose record charges more than its quota.
    fn check_quota(&mut self, node: &Node) -> Option<String> {
        let records = fs::read_dir(node.machine.path("run/sessions")).unwrap();
        let records = records.map(|record| record.unwrap().path());
        for path in records.filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "json")
        }) {
            // The agent may be replacing the file.
            let Ok(text) = fs::read(&path) else { continue };
            let Ok(record) = serde_json::from_slice(&text) else {
                continue;
            };
            match charged_units(&record) {
                Ok(units) => self.max_charged = self.max_charged.max(units),
                Err(violation) => return Some(violation),
            }
        }
        None
    }

    /// Finds a runtime thread of the agent that has slept in a close, or in the release of a
    /// received descriptor, for some samples.
    fn check_closes(&mut self, node: &Node) -> Option<String> {
        let tasks = format!("/proc/{}/task", node.machine.agent_pid());
        let mut closing = BTreeMap::new();
        for task in fs::read_dir(tasks).into_iter().flatten().flatten() {
            let task = task.path();
            let read = |name: &str| read_task_file(&task, name);
            let (name, stat, stack) = (read("comm"), read("stat"), read("stack"));
            self.stacks_read += u64::from(name.starts_with("tokio") && !stack.is_empty());
            if sleeps_in_a_close(&name, &stat, &stack) {
                closing.insert(task, stack);
            }
        }
        stuck_task(&mut self.asleep, closing)
    }
}

fn read_task_file(task: &Path, name: &str) -> String {
    fs::read_to_string(task.join(name)).unwrap_or_default()
}

/// The amount that a session record charges to the container, at most the quota of its GPU, which
/// covers its managed memory too.
fn charged_units(record: &Value) -> Result<u64, String> {
    let list = |name: &str| {
        let list = record[name].as_array();
        list.ok_or_else(|| format!("no `{name}` in the record {record}"))
    };
    let mut sums: BTreeMap<u64, u64> = BTreeMap::new();
    let mut add = |units: &Value| {
        for (account, units) in units.as_array().into_iter().flatten().enumerate() {
            *sums.entry(account as u64).or_default() += units.as_u64().unwrap_or(u64::MAX / 2);
        }
    };
    for process in list("processes")? {
        add(&process["granted"]);
    }
    for image in list("exited")?.iter().chain(list("orphaned")?) {
        add(&image[1]);
    }
    for lease in list("leases")? {
        let account = lease[1].as_u64().unwrap_or_default();
        *sums.entry(account).or_default() += lease[2].as_u64().unwrap_or(u64::MAX / 2);
    }
    let charged: u64 = sums.values().sum();
    if charged > QUOTA.0.into() {
        let quota = QUOTA.0;
        return Err(format!("{sums:?} units of {quota}: {record}"));
    }
    Ok(charged)
}

/// Whether `/proc` shows a thread of the runtime that sleeps while the kernel releases a file.
fn sleeps_in_a_close(name: &str, stat: &str, stack: &str) -> bool {
    let state = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    name.starts_with("tokio") && !state.starts_with('R') && stack.contains("__fput")
}

/// Counts the samples in which each thread slept, and reports a thread that slept too long.
fn stuck_task(
    asleep: &mut BTreeMap<PathBuf, u32>,
    closing: BTreeMap<PathBuf, String>,
) -> Option<String> {
    let before = std::mem::take(asleep);
    for (task, stack) in closing {
        let looks = before.get(&task).unwrap_or(&0) + 1;
        if looks >= MAX_SLEEPING_SAMPLES {
            return Some(format!(
                "a thread of the runtime sleeps in a close:\n{stack}"
            ));
        }
        asleep.insert(task, looks);
    }
    None
}

/// Describes a loss of credit in a neighbour's process that holds this much of its quota.
pub(crate) fn neighbour_violation(page: &CreditPageLayout, held: Units) -> Option<String> {
    let Some(slot) = page.slot(0) else {
        return Some("its account is gone".to_owned());
    };
    let (fence, word, quota) = (page.fence(), slot.word(), slot.quota());
    let violation = match () {
        () if fence != 0 => "it is fenced",
        () if word.used != held.0 => "its use is another",
        () if word.granted < held.0 => "it lost credit",
        () if quota != QUOTA => "its quota is another",
        () => return None,
    };
    Some(format!(
        "{violation}: fence {fence}, {word:?}, quota {quota:?}"
    ))
}

/// Finds a finding about any other container. The metrics count all findings, and the log names the
/// container of each.
pub(crate) fn false_finding(metrics: &str, log: &str, hostile: &[&str]) -> Option<String> {
    let count = |line: &str| {
        let labels = line.strip_prefix("bursar_agent_findings_total")?;
        labels.rsplit_once(' ')?.1.parse::<usize>().ok()
    };
    let counts: Vec<usize> = metrics.lines().filter_map(count).collect();
    let findings = log
        .lines()
        .filter(|line| line.contains("audit finding finding="));
    let findings: Vec<&str> = findings.collect();
    // The metrics lack kinds without a finding, but always contain the audits.
    let audits = metrics.lines().any(|line| {
        let count = line.strip_prefix("bursar_agent_audit_seconds_count ");
        count.is_some_and(|count| count != "0")
    });
    if !audits || findings.len() < counts.iter().sum() {
        let lines = findings.len();
        return Some(format!("{counts:?} findings are counted, {lines} logged"));
    }
    let is_hostile = |line: &str| hostile.iter().any(|name| line.contains(name));
    let other = findings.into_iter().find(|line| !is_hostile(line));
    other.map(str::to_owned)
}

mod tests {
    use bursar_protocol::credit::CreditWord;
    use bursar_protocol::credit_page::CreditPage;
    use bursar_protocol::fence::Fence;
    use serde_json::json;

    use super::*;

    fn record(granted: u32, exited: u32, orphaned: u32, leased: u32) -> Value {
        json!({
            "processes": [{ "granted": [granted, 0] }],
            "exited": [[7, [exited, 0]]],
            "orphaned": [[8, [orphaned, 0]]],
            "leases": [[1, 0, leased]],
        })
    }

    #[test]
    fn charged_units_are_the_sum_of_a_record() {
        assert_eq!(
            charged_units(&record(QUOTA.0 - 6, 1, 2, 3)),
            Ok(QUOTA.0.into())
        );
    }

    #[test]
    fn charged_units_fail_when_any_part_passes_the_quota() {
        for part in 0..4 {
            let mut parts = [QUOTA.0 / 4; 4];
            parts[part] += 1;
            let [granted, exited, orphaned, leased] = parts;
            assert!(
                charged_units(&record(granted, exited, orphaned, leased)).is_err(),
                "{parts:?}"
            );
        }
        let both = json!({ "processes": [{ "granted": [QUOTA.0, 1] }], "exited": [], "orphaned": [], "leases": [] });
        assert!(charged_units(&both).is_err(), "with managed memory");
    }

    #[test]
    fn charged_units_fail_when_a_list_has_another_name() {
        for name in ["processes", "exited", "orphaned", "leases"] {
            let mut record = record(0, 0, 0, 0);
            record.as_object_mut().unwrap().remove(name);
            assert!(charged_units(&record).unwrap_err().contains(name));
        }
    }

    #[test]
    fn sleeps_in_a_close_is_true_for_runtime_threads_only() {
        let stack = "[<0>] tcp_close+0x1\n[<0>] __fput+0xb1/0x150\n";
        let (asleep, runs) = ("7 (a) b) S 1", "7 (tokio) R 1");
        assert!(sleeps_in_a_close("tokio-rt-worker\n", asleep, stack));
        assert!(!sleeps_in_a_close("tokio-rt-worker\n", runs, stack));
        assert!(!sleeps_in_a_close("closer\n", asleep, stack));
        assert!(!sleeps_in_a_close(
            "tokio-rt-worker\n",
            asleep,
            "[<0>] ep_poll+0x1\n"
        ));
    }

    #[test]
    fn stuck_task_is_reported_after_four_samples_in_a_close() {
        let mut asleep = BTreeMap::new();
        let mut look = |task: &str| {
            let closing = BTreeMap::from([(PathBuf::from(task), "__fput".to_owned())]);
            stuck_task(&mut asleep, closing)
        };
        let looks = ["1", "1", "1", "2", "1", "1", "1"];
        assert!(looks.into_iter().all(|task| look(task).is_none()));
        assert!(look("1").is_some_and(|message| message.contains("sleeps in a close")));
    }

    #[test]
    fn neighbour_violation_names_what_the_neighbour_lost() {
        let (page, _file) = CreditPage::create(1).unwrap();
        let (slot, held) = (page.slot(0).unwrap(), Units(8));
        let honest = CreditWord {
            granted: 9,
            used: 8,
        };
        slot.set_quota(QUOTA);
        slot.set(honest);
        assert_eq!(neighbour_violation(&page, held), None);
        slot.set(CreditWord {
            granted: 7,
            used: 8,
        });
        assert!(
            neighbour_violation(&page, held)
                .unwrap()
                .contains("lost credit")
        );
        slot.set(CreditWord {
            granted: 9,
            used: 7,
        });
        assert!(
            neighbour_violation(&page, held)
                .unwrap()
                .contains("its use")
        );
        slot.set(honest);
        slot.set_quota(Units(QUOTA.0 - 1));
        assert!(neighbour_violation(&page, held).unwrap().contains("quota"));
        page.set_fence(Some(Fence::Drained));
        assert!(neighbour_violation(&page, held).unwrap().contains("fenced"));
    }

    const AUDITS: &str = "bursar_agent_audit_seconds_count 7\n";

    #[test]
    fn false_finding_names_a_finding_of_another_container() {
        let count =
            |count| format!("{AUDITS}bursar_agent_findings_total{{finding=\"holder\"}} {count}\n");
        let finding =
            |name| format!("WARN audit finding finding=Holder {{ allocation: {name} }}\n");
        let (own, other) = (finding("aa"), finding("bb"));
        assert_eq!(false_finding(AUDITS, "", &["aa"]), None);
        assert_eq!(false_finding(&count(1), &own, &["aa"]), None);
        let message = false_finding(&count(2), &format!("{own}{other}"), &["aa"]);
        assert!(message.is_some_and(|message| message.contains("bb")));
    }

    #[test]
    fn false_finding_is_reported_when_no_audits_are_seen() {
        let counted = format!("{AUDITS}bursar_agent_findings_total{{finding=\"holder\"}} 1\n");
        assert!(false_finding("bursar_agent_kills_total 0\n", "", &[]).is_some());
        assert!(false_finding(&counted, "WARN audit finding found=Holder\n", &["aa"]).is_some());
    }
}
