//! Tests the generation of a device's memory, and the subscribers to its changes.

use bursar_runtime::DeviceRuntime;
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::examples::subscription;

#[test]
fn subscribers_are_notified_and_generations_grow() {
    run_in_subprocess(ONE_GPU, |_| {
        subscription::main().unwrap();
        let second = DeviceRuntime::for_ordinal(0).unwrap();
        // Outside of a container the process generation is 0.
        assert_eq!(second.generation().to_string(), "0.2");
    });
}
