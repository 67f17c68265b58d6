//! Shows a program that is restarted in place after a fault.

use serde_json::Value;

use super::workloads::{RETAINED, Workloads};
use super::{DemoError, TIMEOUT, report};
use crate::environment::Environment;
use crate::pods::Pods;
use crate::progress::Progress;

/// Runs a pod whose program faults once, and waits until it runs again.
///
/// # Errors
/// When the program does not run again in time.
pub(super) async fn run(
    environment: &Environment,
    workloads: &Workloads,
    progress: &Progress,
) -> Result<(), DemoError> {
    let workload = &workloads.faulting;
    let pods = Pods::in_namespace(&environment.cluster.client(), workload.namespace).await?;
    pods.create(&workload.pod(&environment.probe_image)).await?;
    let event = |line: &str, event: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        (line["event"] == event).then_some(line)
    };
    let faulting = |line: &str| event(line, "faulting");
    let fault = pods.wait_for_log_line(&workload.name, TIMEOUT, faulting);
    let fault = fault.await?;
    report(progress, workload, "faults, as after an illegal address");
    let steady = |line: &str| event(line, "steady");
    let steady = pods.wait_for_log_line(&workload.name, TIMEOUT, steady);
    let recovery = Recovery::of(&fault, &steady.await?);
    let restarts = pods.state(&workload.name).await?.restarts;
    report(progress, workload, recovery.summary(restarts));
    Ok(())
}

/// The time and the outcome of a restart in place.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Recovery {
    seconds: f64,
    found: bool,
}

impl Recovery {
    /// Reads the probe's line about the fault, and that of the process image without a fault.
    fn of(fault: &Value, steady: &Value) -> Self {
        let starts = steady["starts"].as_array();
        let last = starts.and_then(|starts| starts.last());
        let millis = |event: Option<&Value>| event.and_then(|event| event["at"].as_f64());
        let seconds = match (millis(Some(fault)), millis(last)) {
            (Some(fault), Some(start)) => (start - fault) / 1000.0,
            _ => 0.0,
        };
        Self {
            seconds,
            found: last.is_some_and(|start| start["retained"]["found"] == true),
        }
    }

    fn summary(self, restarts: i32) -> String {
        let found = if self.found { "has" } else { "lacks" };
        format!(
            "runs again in place after {:.1} s, {found} its {RETAINED} of retained memory, {restarts} restarts",
            self.seconds
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn recovery_is_the_time_to_the_last_start() {
        let fault = json!({ "event": "faulting", "at": 1000 });
        let starts = json!([{ "at": 900 }, { "at": 1250, "retained": { "found": true } }]);
        let recovery = Recovery::of(&fault, &json!({ "event": "steady", "starts": starts }));
        assert_eq!(
            recovery.summary(0),
            "runs again in place after 0.2 s, has its 64Mi of retained memory, 0 restarts"
        );
    }
}
