//! The rules of a budget, checked as the API server checks them (`kube`'s cel feature).

use super::{
    ContextPolicy, DeviceMemory, GpuMemoryBudget, GpuMemoryBudgetSpec, ManagedMemory, Overflow,
    Override, PerContainer,
};
use crate::Amount;

fn budget(guaranteed: &str, limit: Option<&str>) -> GpuMemoryBudget {
    let spec = GpuMemoryBudgetSpec {
        device_memory: DeviceMemory {
            guaranteed: guaranteed.into(),
            limit: limit.map(Amount::from),
        },
        managed_memory: None,
        compute: None,
        per_container: None,
        cohort: "default".to_owned(),
        overflow: Overflow::default(),
        context_policy: None,
        overrides: Vec::new(),
    };
    GpuMemoryBudget::new("default", spec)
}

fn refusal(budget: &GpuMemoryBudget) -> String {
    budget
        .validate_cel()
        .expect_err("the rules refuse it")
        .to_string()
}

#[test]
fn a_guarantee_up_to_the_limit_is_accepted() {
    for (guaranteed, limit) in [
        ("64Gi", None),
        ("64Gi", Some("64Gi")),
        ("65536Mi", Some("64Gi")),
        ("0", Some("160Gi")),
        ("1536Mi", Some("1536Mi")),
        ("0", Some("0")),
    ] {
        let result = budget(guaranteed, limit).validate_cel();
        assert!(result.is_ok(), "{guaranteed} {limit:?}: {result:?}");
    }
}

#[test]
fn a_guarantee_above_the_limit_is_refused() {
    for (guaranteed, limit) in [("65Gi", "64Gi"), ("1Ti", "1000Gi"), ("64Gi", "64G")] {
        let message = refusal(&budget(guaranteed, Some(limit)));
        assert!(
            message.contains("guaranteed must not be more than limit"),
            "{message}"
        );
    }
}

#[test]
fn a_budget_has_one_name() {
    let mut other = budget("1Gi", None);
    other.metadata.name = Some("mine".to_owned());
    assert!(refusal(&other).contains("its name is `default`"));
}

#[test]
fn broken_bytes_are_refused() {
    for text in ["0.3", "1.0000001Ki"] {
        let message = refusal(&budget(text, None));
        assert!(
            message.contains("whole number of bytes"),
            "{text}: {message}"
        );
    }
}

#[test]
fn plain_number_of_gib_is_refused_with_the_remedy() {
    let message = refusal(&budget("8", Some("16Gi")));
    assert!(message.contains("write 8Gi, not 8"), "{message}");
    let limit = refusal(&budget("0", Some("48")));
    assert!(limit.contains("write 48Gi, not 48"), "{limit}");
    let bytes = budget("68719476736", None).validate_cel();
    assert!(bytes.is_ok(), "{bytes:?}");
}

#[test]
fn a_container_may_have_what_the_namespace_has_and_no_more() {
    let with_max = |limit: Option<&str>, max: &str| {
        let mut budget = budget("16Gi", limit);
        budget.spec.per_container = Some(PerContainer {
            max: Some(max.into()),
            max_managed: None,
        });
        budget
    };
    assert!(with_max(None, "16Gi").validate_cel().is_ok());
    assert!(with_max(Some("32Gi"), "32Gi").validate_cel().is_ok());
    assert!(refusal(&with_max(None, "17Gi")).contains("perContainer.max"));
    assert!(refusal(&with_max(Some("32Gi"), "33Gi")).contains("perContainer.max"));
}

#[test]
fn a_container_may_have_the_managed_memory_of_its_namespace() {
    let with_max = |limit: Option<&str>, max: &str| {
        let mut budget = budget("16Gi", None);
        budget.spec.managed_memory = limit.map(|limit| ManagedMemory {
            limit: limit.into(),
        });
        budget.spec.per_container = Some(PerContainer {
            max: None,
            max_managed: Some(max.into()),
        });
        budget
    };
    for (limit, max) in [
        (Some("32Gi"), "32Gi"),
        (Some("32Gi"), "0"),
        (None, "0"),
        (Some("34359738368"), "1536Mi"),
    ] {
        let result = with_max(limit, max).validate_cel();
        assert!(result.is_ok(), "{limit:?} {max}: {result:?}");
    }
    for (limit, max, words) in [
        (Some("32Gi"), "33Gi", "more than managedMemory.limit"),
        (None, "1Gi", "more than managedMemory.limit"),
        (Some("32Gi"), "0.5", "whole number of bytes"),
        (Some("32Gi"), "8", "write 8Gi, not 8"),
    ] {
        let message = refusal(&with_max(limit, max));
        assert!(message.contains(words), "{limit:?} {max}: {message}");
    }
}

#[test]
fn managed_memory_is_whole_bytes_as_well() {
    let mut budget = budget("1Gi", None);
    budget.spec.managed_memory = Some(ManagedMemory {
        limit: "32Gi".into(),
    });
    assert!(budget.validate_cel().is_ok());
    budget.spec.managed_memory = Some(ManagedMemory {
        limit: "0.5".into(),
    });
    assert!(refusal(&budget).contains("whole number of bytes"));
}

#[test]
fn an_override_is_whole_bytes_as_well() {
    let lowered_to = |amount: &str| {
        let mut budget = budget("16Gi", None);
        budget.spec.overrides = ["1Gi", amount]
            .map(|amount| Override {
                pod: format!("pod-{amount}"),
                device_memory: Some(amount.into()),
                ..Override::default()
            })
            .to_vec();
        budget
    };
    for text in ["0", "4Gi", "1536Mi"] {
        let result = lowered_to(text).validate_cel();
        assert!(result.is_ok(), "{text}: {result:?}");
    }
    for text in ["0.5", "1.0000001Ki"] {
        let message = refusal(&lowered_to(text));
        assert!(
            message.contains("whole number of bytes"),
            "{text}: {message}"
        );
    }
}

#[test]
fn an_override_lowers_device_or_managed_memory() {
    let lowered = |json: &str| {
        let mut budget = budget("16Gi", None);
        budget.spec.overrides = vec![serde_json::from_str(json).unwrap()];
        budget
    };
    for text in [
        r#"{"pod":"p","managedMemory":"4Gi"}"#,
        r#"{"pod":"p","deviceMemory":"8Gi","managedMemory":0}"#,
    ] {
        let result = lowered(text).validate_cel();
        assert!(result.is_ok(), "{text}: {result:?}");
    }
    for (text, reason) in [
        (r#"{"pod":"p"}"#, "set deviceMemory, managedMemory or both"),
        (
            r#"{"pod":"p","managedMemory":"0.5"}"#,
            "whole number of bytes",
        ),
        (r#"{"pod":"p","managedMemory":4}"#, "write 4Gi, not 4"),
    ] {
        let message = refusal(&lowered(text));
        assert!(message.contains(reason), "{text}: {message}");
    }
}

#[test]
fn missing_fields_have_defaults() {
    let spec: GpuMemoryBudgetSpec =
        serde_json::from_str(r#"{"deviceMemory":{"guaranteed":0}}"#).unwrap();
    assert_eq!(spec, budget("0", None).spec);
    let policy: ContextPolicy = serde_json::from_str("{}").unwrap();
    assert_eq!(policy, ContextPolicy::default());
    assert_eq!(policy.action, None, "the cluster's default");
}
