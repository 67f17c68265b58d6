//! Whether a Job lets its pods be disrupted.

use k8s_openapi::api::batch::v1::Job;
use kube::{Api, Client, ResourceExt as _};

use crate::api::read::{AskError, ask};
use crate::cluster::pod_request::Owner;

/// Whether `job` does not take an evicted pod for a failed one. Of a Job that is gone nothing can fail any more. What is
/// asked never changes: the policy of a Job is immutable.
///
/// # Errors
/// None of them says anything of the Job.
pub async fn lets_go(client: &Client, namespace: &str, job: &Owner) -> Result<bool, AskError> {
    let jobs = Api::<Job>::namespaced(client.clone(), namespace);
    let found = ask(&format!("Job {}", job.name), jobs.get_opt(&job.name)).await?;
    let found = found.filter(|found| found.uid().as_ref() == Some(&job.uid));
    Ok(found.is_none_or(|found| ignores_disruption(&found)))
}

fn ignores_disruption(job: &Job) -> bool {
    let policy = job
        .spec
        .as_ref()
        .and_then(|spec| spec.pod_failure_policy.as_ref());
    let first = policy
        .into_iter()
        .flat_map(|policy| &policy.rules)
        .find(|rule| {
            let conditions = rule.on_pod_conditions.iter().flatten();
            let mut conditions = conditions.filter(|on| on.type_ == "DisruptionTarget");
            conditions.any(|on| on.status == "True")
        });
    // A rule on exit codes that comes before it may match a program that ends badly when it is told to.
    let exits_first = policy
        .and_then(|policy| policy.rules.first())
        .is_some_and(|rule| rule.on_exit_codes.is_some());
    first.is_some_and(|rule| rule.action == "Ignore") && !exits_first
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn job(rules: Value) -> Job {
        serde_json::from_value(json!({ "spec": {
            "template": { "spec": { "containers": [] } }, "podFailurePolicy": { "rules": rules } } }))
        .unwrap()
    }

    #[test]
    fn a_job_lets_its_pods_go_only_where_its_policy_says_so_first() {
        let ignore = json!({ "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }] });
        let fail = json!({ "action": "FailJob", "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }] });
        let exit =
            json!({ "action": "FailJob", "onExitCodes": { "operator": "In", "values": [1] } });
        assert!(ignores_disruption(&job(json!([ignore]))));
        assert!(ignores_disruption(&job(json!([ignore, exit]))));
        assert!(!ignores_disruption(&job(json!([exit, ignore]))));
        assert!(!ignores_disruption(&job(json!([fail, ignore]))));
        assert!(!ignores_disruption(&job(json!([]))));
        assert!(!ignores_disruption(&Job::default()));
    }
}
