//! Rewrites manifests of other ways to share GPUs: HAMi, KAI, and NVIDIA's time-slicing and MPS.
//!
//! | from | becomes |
//! |---|---|
//! | `nvidia.com/gpumem` (MiB) | quanta of device memory, rounded up |
//! | `nvidia.com/gpumem-percentage`, a fraction, a replica | a part of `--gpu-memory` |
//! | several GPUs | the sum, and the annotation `bursar.dev/gpus` |
//! | a quota of `limits.nvidia.com/gpumem` | a `GpuMemoryBudget` |
//!
//! Fields without a counterpart are refused by their names.

mod pod;
mod quota;

use bursar_crds::Quantum;
use serde::{Deserialize as _, Serialize as _};
use serde_yaml_ng::Value;

/// The most bytes of a file.
pub const MAX_BYTES: u64 = 4 << 20;

/// The user's answers about the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assumptions {
    /// The memory of one GPU in bytes.
    pub gpu_memory: Option<u64>,
    /// The replicas of each GPU in the time-slicing or MPS configuration.
    pub replicas: Option<u64>,
    /// The cluster's quantum.
    pub quantum: Quantum,
}

/// Why a manifest cannot be rewritten.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// The text is no YAML.
    #[error("failed to parse the manifest: {0}")]
    Syntax(String),
    /// A field has no counterpart.
    #[error("{object}: {field} has no counterpart: {remedy}")]
    NoCounterpart {
        /// The object.
        object: String,
        /// The field.
        field: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// A value is not what the field takes.
    #[error("{object}: {field} is {value}: write {expected}")]
    Value {
        /// The object.
        object: String,
        /// The field.
        field: String,
        /// The value.
        value: String,
        /// The values that the field takes.
        expected: &'static str,
    },
    /// A share needs the memory of a GPU.
    #[error("{object}: {field} is a share of a GPU: say how much memory a GPU has, with --gpu-memory{}", if *.replicas { " and --replicas" } else { "" })]
    ShareOfUnknown {
        /// The object.
        object: String,
        /// The field.
        field: String,
        /// Whether the number of replicas is missing too.
        replicas: bool,
    },
}

/// A rewritten manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Converted {
    /// The documents as YAML.
    pub yaml: String,
    /// Notes for the user, a line each.
    pub notes: Vec<String>,
}

/// The document that is rewritten, for messages, and what the user should know.
struct Document {
    name: String,
    notes: Vec<String>,
}

impl Document {
    fn note(&mut self, text: impl AsRef<str>) {
        let note = format!("{}: {}", self.name, text.as_ref());
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    fn no_counterpart(&self, field: impl Into<String>, remedy: &'static str) -> ConvertError {
        ConvertError::NoCounterpart {
            object: self.name.clone(),
            field: field.into(),
            remedy,
        }
    }

    fn share_of_unknown(&self, field: impl Into<String>, replicas: bool) -> ConvertError {
        ConvertError::ShareOfUnknown {
            object: self.name.clone(),
            field: field.into(),
            replicas,
        }
    }

    fn wrong(&self, field: &str, value: impl Into<String>, expected: &'static str) -> ConvertError {
        let (object, field) = (self.name.clone(), field.to_owned());
        ConvertError::Value {
            object,
            field,
            value: value.into(),
            expected,
        }
    }
}

/// Rewrites all documents of a manifest.
///
/// # Errors
/// Names the first field that has no counterpart, in the first such document.
pub fn convert(text: &str, assumptions: Assumptions) -> Result<Converted, ConvertError> {
    let mut converted = Converted::default();
    for document in serde_yaml_ng::Deserializer::from_str(text) {
        let value = Value::deserialize(document)
            .map_err(|error| ConvertError::Syntax(error.to_string()))?;
        if value.is_null() {
            continue;
        }
        object(value, assumptions, &mut converted)?;
    }
    Ok(converted)
}

fn object(
    mut value: Value,
    assumptions: Assumptions,
    into: &mut Converted,
) -> Result<(), ConvertError> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let kind = text(&value["kind"]);
    let name = format!("{kind} {}", text(&value["metadata"]["name"]));
    let mut document = Document {
        name,
        notes: Vec::new(),
    };
    if kind == "List" {
        for item in value["items"].as_sequence().cloned().unwrap_or_default() {
            object(item, assumptions, into)?;
        }
        return Ok(());
    }
    let mut documents = Vec::new();
    match kind.as_str() {
        "ResourceQuota" => documents.extend(quota::convert(&mut value, &mut document)?),
        "ConfigMap" if quota::is_sharing(&value) => {
            document
                .note("is the plugin's own configuration, which Bursar does not need: left out");
            value = Value::Null;
        }
        "RuntimeClass" => {
            document.note("Bursar needs no RuntimeClass: left out");
            value = Value::Null;
        }
        _ => pod::convert(&mut value, assumptions, &mut document)?,
    }
    if !value.is_null() {
        documents.insert(0, value);
    }
    for document in documents {
        if !into.yaml.is_empty() {
            into.yaml.push_str("---\n");
        }
        let mut yaml = Vec::new();
        let mut serializer = serde_yaml_ng::Serializer::new(&mut yaml);
        document
            .serialize(&mut serializer)
            .map_err(|error| ConvertError::Syntax(error.to_string()))?;
        into.yaml.push_str(&String::from_utf8_lossy(&yaml));
    }
    into.notes.append(&mut document.notes);
    Ok(())
}

/// A number that YAML has as a number or a text.
fn number(value: &Value) -> Option<u64> {
    value
        .as_u64()
        .or_else(|| bursar_crds::quantity::parse_bytes(value.as_str()?).ok())
}
