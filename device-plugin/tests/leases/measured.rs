//! Tests the agent's own measurement of a CUDA context's size, which needs no retained memory.

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;

use crate::fixture::{Fixture, wait_for_scrub_check};
use crate::machine::TWO_GPUS;

/// The size of a context of the simulated GPU.
const CONTEXT_BYTES: u64 = 518 << 20;

/// The sizes that the agent has measured, by GPU.
fn context_sizes(fixture: &Fixture) -> BTreeMap<String, u64> {
    let text = fs::read_to_string(fixture.machine.path("run/contexts.json")).unwrap_or_default();
    let file: Value = serde_json::from_str(&text).unwrap_or_default();
    let sizes = file["data"].as_object().cloned().unwrap_or_default();
    let size = |(gpu, size): (String, Value)| Some((gpu, size["bytes"].as_u64()?));
    sizes.into_iter().filter_map(size).collect()
}

#[tokio::test]
async fn agent_measures_contexts_itself_and_once_a_boot() {
    // There is no fd store, so no memory is retained.
    let mut fixture = Fixture::with_driver(TWO_GPUS).await;
    wait_for_scrub_check("a context of each GPU", || {
        context_sizes(&fixture).len() == 2
    })
    .await;
    let measured = context_sizes(&fixture);
    assert!(
        measured.values().all(|size| *size == CONTEXT_BYTES),
        "{measured:?}"
    );
    // Former agents wrote such sizes as reported by tenants.
    let former: BTreeMap<&String, u64> = measured.keys().map(|gpu| (gpu, 1 << 30)).collect();
    let former = serde_json::to_string(&former).unwrap();
    fs::write(fixture.machine.path("state/contexts.json"), &former).unwrap();
    fixture.machine.restart_agent().await;
    assert_eq!(context_sizes(&fixture), measured);
    let log = fixture.machine.log();
    assert_eq!(log.matches("context measured").count(), 2, "once a boot");
    // An agent must start despite a file of the former format.
    fs::write(fixture.machine.path("run/contexts.json"), &former).unwrap();
    fixture.machine.restart_agent().await;
    wait_for_scrub_check("a context of each GPU", || {
        context_sizes(&fixture) == measured
    })
    .await;
}
