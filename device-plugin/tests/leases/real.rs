//! A tenant as users have it: the runtime's own client, in a container of its CDI file, through the shim.

use serde_json::Value;

use crate::bed::{Bed, GIB, open, programs};
use crate::common::kubelet::Pod;
use crate::container::{Container, PLAIN};

/// An image of the client in a pod's container, and what it says of the memory that it found or kept.
pub(crate) async fn client(bed: &Bed, pod: &Pod) -> (Container, Value) {
    let program = programs().join("examples/kept");
    let mut client = Container::run(&bed.machine, pod, PLAIN, &program, "image - 67108864").await;
    bed.machine.adopt(pod, client.pid());
    let line = client.read();
    let told = serde_json::from_str(&line);
    (
        client,
        told.unwrap_or_else(|error| panic!("{error}: {line}")),
    )
}

#[tokio::test]
async fn a_real_client_finds_what_it_kept_through_the_shim_after_kills_and_an_agents_restart() {
    let mut bed = Bed::new().await;
    // Once this answers, the GPUs were seen to clear freed memory: the client would not wait so long.
    let other = bed.machine.run("other", 2).await;
    assert!(open(&mut bed.tenant(&other), "other", GIB).is_ok());
    let pod = bed.machine.admit("a", 4).await;
    let (mut first, made) = client(&bed, &pod).await;
    assert_eq!(made["found"], false);
    // It kills itself: what is read is the end of its output, which may come before it has ended.
    assert_eq!(first.call("kill"), "");
    drop(first);
    let (second, found) = client(&bed, &pod).await;
    assert_eq!(
        (&found["found"], &found["checksum"]),
        (&Value::Bool(true), &made["checksum"])
    );
    drop(second);
    bed.machine.restart_agent().await;
    let (_third, again) = client(&bed, &pod).await;
    assert_eq!(
        (&again["found"], &again["checksum"]),
        (&Value::Bool(true), &made["checksum"])
    );
}
