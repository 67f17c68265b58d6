//! Makes the archive for a bug report, without tenants' data except names.

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::doctor;
use crate::objects::Pod;
use crate::snapshot::Snapshot;

/// The most bytes of one log.
pub const MAX_LOG_BYTES: usize = 1 << 20;

/// The most logs in an archive.
const MAX_LOGS: usize = 100;

/// A file of the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// The path in the archive.
    pub path: String,
    /// The content.
    pub content: Vec<u8>,
}

impl File {
    fn json(name: &str, value: &Value) -> Self {
        let text = serde_json::to_string_pretty(value).unwrap_or_else(|error| error.to_string());
        Self {
            path: format!("bursar-support/{name}.json"),
            content: text.into_bytes(),
        }
    }

    /// The list of the logs that the archive does not have, with the reason of each.
    pub fn left_out(reasons: &[String]) -> Self {
        Self {
            path: "bursar-support/logs/left-out.txt".to_owned(),
            content: (reasons.join("\n") + "\n").into_bytes(),
        }
    }

    /// The log of one of Bursar's own pods.
    pub fn log(pod: &str, text: &str) -> Self {
        // The end of a log tells more than its beginning.
        let from = text.len().saturating_sub(MAX_LOG_BYTES);
        let from = (from..text.len())
            .find(|at| text.is_char_boundary(*at))
            .unwrap_or(from);
        let name = pod.replace(
            |c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '.',
            "_",
        );
        Self {
            path: format!("bursar-support/logs/{name}.log"),
            content: text.as_bytes()[from..].to_vec(),
        }
    }
}

/// The pods whose logs are read, those that are not ready first, and the pods that are too many.
pub fn logged(pods: &[Pod]) -> (Vec<&Pod>, Vec<&Pod>) {
    let mut logged: Vec<&Pod> = pods.iter().collect();
    logged.sort_by_key(|pod| pod.is_ready());
    let left_out = logged.split_off(logged.len().min(MAX_LOGS));
    (logged, left_out)
}

/// The files of a snapshot. The types of pods and Events have no variable, argument or annotation.
pub fn files(snapshot: &Snapshot, configuration: Option<&Value>) -> Vec<File> {
    let mut files = vec![
        File::json(
            "gpunodes",
            &without_managed_fields(json!(snapshot.gpu_nodes)),
        ),
        File::json(
            "gpunamespaces",
            &without_managed_fields(json!(snapshot.gpu_namespaces)),
        ),
        File::json(
            "gpumemorybudgets",
            &without_managed_fields(json!(snapshot.budgets)),
        ),
        File::json("pods", &json!(snapshot.pods)),
        File::json("own-pods", &json!(snapshot.own_pods)),
        File::json("daemonsets", &json!(snapshot.daemon_sets)),
        File::json("nodes", &json!(snapshot.nodes)),
        File::json("resourcequotas", &json!(snapshot.quotas)),
        File::json("events", &json!(snapshot.events)),
        File::json("doctor", &doctor::json(&doctor::examine(snapshot))),
        File::json("versions", &crate::version::json(snapshot)),
    ];
    if let Some(configuration) = configuration {
        files.push(File::json("agent-configuration", configuration));
    }
    files
}

/// Objects without their history of writers and without annotations, which tenants may write.
fn without_managed_fields(mut objects: Value) -> Value {
    for object in objects.as_array_mut().into_iter().flatten() {
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.remove("managedFields");
            metadata.remove("annotations");
        }
    }
    objects
}

/// The list of files that is shown before the archive is written.
pub fn listing(files: &[File]) -> String {
    let mut text = String::from(
        "The archive has names of namespaces, pods, containers, images and nodes, and logs of Bursar:\n",
    );
    for file in files {
        text.push_str(&format!("  {} ({} bytes)\n", file.path, file.content.len()));
    }
    text
}

/// The archive.
///
/// # Errors
/// When memory cannot be written, which does not happen.
pub fn archive(files: &[File]) -> std::io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    for file in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(file.content.len() as u64);
        header.set_mode(0o600);
        archive.append_data(&mut header, &file.path, file.content.as_slice())?;
    }
    archive.into_inner()?.finish()
}
