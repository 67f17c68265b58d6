//! Rewrites quotas of GPU memory to budgets.

use bursar_crds::quantity::format_bytes;
use serde_json::json;
use serde_yaml_ng::Value;

use super::pod::mapping;
use super::{ConvertError, Document, number};

/// Rewrites a ResourceQuota of HAMi's memory. Other amounts stay in it; an empty quota is dropped.
pub(super) fn convert(
    value: &mut Value,
    document: &mut Document,
) -> Result<Vec<Value>, ConvertError> {
    let Some(hard) = mapping(value, &["spec", "hard"]) else {
        return Ok(Vec::new());
    };
    let mut guaranteed = None;
    let names: Vec<String> = hard
        .keys()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect();
    for name in names {
        let resource = name
            .strip_prefix("limits.")
            .or_else(|| name.strip_prefix("requests."))
            .unwrap_or(&name);
        match resource {
            "nvidia.com/gpumem" => {
                let amount = hard.remove(name.as_str()).unwrap_or_default();
                let mib = number(&amount).ok_or_else(|| {
                    document.wrong(&name, format!("{amount:?}"), "a number of MiB")
                })?;
                guaranteed = Some(mib.saturating_mul(1 << 20));
            }
            "nvidia.com/gpucores" => {
                return Err(
                    document.no_counterpart(name, "Bursar does not limit computing; take it out")
                );
            }
            "nvidia.com/gpu" => {
                hard.remove(name.as_str());
                document.note(format!(
                    "{name} counts GPUs, which Bursar does not: taken out"
                ));
            }
            _ => {}
        }
    }
    let is_empty = hard.is_empty();
    let namespace = value["metadata"]["namespace"].as_str().map(str::to_owned);
    if is_empty {
        *value = Value::Null;
    }
    let Some(guaranteed) = guaranteed else {
        return Ok(Vec::new());
    };
    let mut budget = json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget", "metadata": { "name": "default" },
        "spec": { "deviceMemory": { "guaranteed": format_bytes(guaranteed).0 } },
    });
    if let Some(namespace) = namespace {
        budget["metadata"]["namespace"] = json!(namespace);
    }
    document.note("became a budget without a limit above its guarantee");
    let budget =
        serde_yaml_ng::to_value(budget).map_err(|error| ConvertError::Syntax(error.to_string()))?;
    Ok(vec![budget])
}

/// Whether a ConfigMap is a configuration of NVIDIA's plugin that shares GPUs.
pub(super) fn is_sharing(value: &Value) -> bool {
    let data = value["data"].as_mapping();
    let mut texts = data
        .into_iter()
        .flat_map(|data| data.values())
        .filter_map(Value::as_str);
    texts.any(|text| {
        text.contains("sharing:") && (text.contains("timeSlicing:") || text.contains("mps:"))
    })
}
