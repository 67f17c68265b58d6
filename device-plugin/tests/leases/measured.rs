//! What the agent finds out about GPUs by itself, whether or not anything is retained: what a context takes.

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;

use crate::bed::{Bed, seen};
use crate::machine::TWO_GPUS;

/// What a context of the simulated GPU takes.
const CONTEXT: u64 = 518 << 20;

/// What the agent has measured, by GPU.
fn sizes(bed: &Bed) -> BTreeMap<String, u64> {
    let text = fs::read_to_string(bed.machine.path("run/contexts.json")).unwrap_or_default();
    let file: Value = serde_json::from_str(&text).unwrap_or_default();
    let sizes = file["data"].as_object().cloned().unwrap_or_default();
    let size = |(gpu, size): (String, Value)| Some((gpu, size["bytes"].as_u64()?));
    sizes.into_iter().filter_map(size).collect()
}

#[tokio::test]
async fn agent_measures_contexts_itself_and_once_a_boot() {
    // No vault: nothing is retained.
    let mut bed = Bed::with_driver(TWO_GPUS).await;
    seen("a context of each GPU", || sizes(&bed).len() == 2).await;
    let measured = sizes(&bed);
    assert!(
        measured.values().all(|size| *size == CONTEXT),
        "{measured:?}"
    );
    // What agents wrote that believed tenants.
    let former: BTreeMap<&String, u64> = measured.keys().map(|gpu| (gpu, 1 << 30)).collect();
    let former = serde_json::to_string(&former).unwrap();
    fs::write(bed.machine.path("state/contexts.json"), &former).unwrap();
    bed.machine.restart_agent().await;
    assert_eq!(sizes(&bed), measured);
    let said = bed.machine.log();
    assert_eq!(said.matches("context measured").count(), 2, "once a boot");
    // A file of the former format is no reason not to start.
    fs::write(bed.machine.path("run/contexts.json"), &former).unwrap();
    bed.machine.restart_agent().await;
    seen("a context of each GPU", || sizes(&bed) == measured).await;
}
