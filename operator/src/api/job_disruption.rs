//! Reads whether a Job ignores the disruption of its pods.

use k8s_openapi::api::batch::v1::Job;
use kube::{Api, Client, ResourceExt as _};

use super::error::{ApiError, with_timeout};
use crate::cluster::facts::pod::JobRef;

/// Whether `job` does not count an evicted pod as a failure. A deleted Job cannot fail. The answer
/// never changes, because a Job's policy is immutable.
///
/// # Errors
/// An error says nothing about the Job.
pub async fn ignores_disruption(
    client: &Client,
    namespace: &str,
    job: &JobRef,
) -> Result<bool, ApiError> {
    let jobs = Api::<Job>::namespaced(client.clone(), namespace);
    let found = with_timeout("read", format!("Job {}", job.name), jobs.get_opt(&job.name)).await?;
    let found = found.filter(|found| found.uid().as_ref() == Some(&job.uid));
    Ok(found.is_none_or(|found| policy_ignores_disruption(&found)))
}

fn policy_ignores_disruption(job: &Job) -> bool {
    let policy = job
        .spec
        .as_ref()
        .and_then(|spec| spec.pod_failure_policy.as_ref());
    // The Job controller applies the first rule that matches. A rule on exit codes may match a
    // program that exits with an error on SIGTERM.
    let first = policy
        .into_iter()
        .flat_map(|policy| &policy.rules)
        .find(|rule| {
            let mut conditions = rule.on_pod_conditions.iter().flatten();
            rule.on_exit_codes.is_some()
                || conditions.any(|on| on.type_ == "DisruptionTarget" && on.status == "True")
        });
    first.is_some_and(|rule| rule.on_exit_codes.is_none() && rule.action == "Ignore")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn job(options: Value) -> Job {
        serde_json::from_value(json!({ "spec": {
            "template": { "spec": { "containers": [] } }, "podFailurePolicy": { "rules": options } } }))
        .unwrap()
    }

    #[test]
    fn job_ignores_disruption_only_by_first_rule_that_applies() {
        let ignore = json!({ "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }] });
        let fail = json!({ "action": "FailJob", "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }] });
        let exit =
            json!({ "action": "FailJob", "onExitCodes": { "operator": "In", "values": [1] } });
        let other = json!({ "action": "FailJob", "onPodConditions": [{ "type": "ConfigIssue", "status": "True" }] });
        assert!(policy_ignores_disruption(&job(json!([ignore]))));
        assert!(policy_ignores_disruption(&job(json!([other, ignore]))));
        assert!(!policy_ignores_disruption(&job(json!([
            other, exit, ignore
        ]))));
        assert!(policy_ignores_disruption(&job(json!([ignore, exit]))));
        assert!(!policy_ignores_disruption(&job(json!([exit, ignore]))));
        assert!(!policy_ignores_disruption(&job(json!([fail, ignore]))));
        assert!(!policy_ignores_disruption(&job(json!([]))));
        assert!(!policy_ignores_disruption(&Job::default()));
    }
}
