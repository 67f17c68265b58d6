//! Tests how retained memory ends, and which container is charged until the memory is free.

use std::time::{Duration, Instant};

use crate::fixture::{Fixture, GIB, compile_c, open_retrying, read_lease};
use crate::tenant_process::{Opened, Tenant};

/// A process in no container that holds a descriptor.
struct ParkedHolder(i32);

impl Drop for ParkedHolder {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.0).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

#[tokio::test]
async fn lease_memory_is_bound_again_only_when_no_process_maps_it() {
    let mut fixture = Fixture::new().await;
    fixture.machine.run("full", 16).await;
    let (first, second) = (
        fixture.machine.run("a", 8).await,
        fixture.machine.run("b", 2).await,
    );
    let mut writer = fixture.tenant(&first);
    let Ok(Opened::Write { lease, token }) = open_retrying(&mut writer, "weights", 6 * GIB) else {
        panic!("it is there");
    };
    assert_eq!(writer.commit(lease, token, 7), "committed");
    let mut reader = fixture.tenant(&second);
    assert_eq!(read_lease(&mut reader, "weights"), (lease, 7));
    writer.kill();
    fixture.machine.end(&first);
    // 16 - 2 - 6 GiB are free: the lease's owner has ended, but the lease has not.
    let queued_pod = fixture.machine.admit("c", 11).await;
    let expected = "waiting for 11 GiB on one GPU: largest free 8 GiB";
    fixture.machine.until_refused(&queued_pod, expected).await;
    fixture.machine.restart_agent().await;
    fixture.machine.until_refused(&queued_pod, expected).await;
    assert_eq!(read_lease(&mut reader, "weights"), (lease, 7));
    let holder = reader.ask(&format!("park {lease}")).unwrap();
    let parked = ParkedHolder(holder.parse().unwrap());
    reader.kill();
    fixture.machine.end(&second);
    fixture
        .machine
        .until_refused(&queued_pod, "largest free 10 GiB")
        .await;
    drop(parked);
    fixture.machine.until_started(&queued_pod).await;
}

/// Discards a lease while a process holds its memory. The owner is charged until that process has
/// ended.
async fn charged_while_held(hold: impl FnOnce(&mut Tenant, u64) -> Option<ParkedHolder>) {
    let fixture = Fixture::new().await;
    let pod = fixture.machine.run("a", 8).await;
    let mut tenant = fixture.tenant(&pod);
    let Ok(Opened::Write { lease, token }) = open_retrying(&mut tenant, "weights", 6 * GIB) else {
        panic!("it is there");
    };
    assert_eq!(tenant.commit(lease, token, 7), "committed");
    let Some(parked) = hold(&mut tenant, lease) else {
        return eprintln!("skipped: io_uring is not permitted here");
    };
    assert_eq!(
        tenant.ask(&format!("discard {lease}")).as_deref(),
        Some("discarded")
    );
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        let refused = tenant.open("weights", 3 * GIB).unwrap_err();
        assert!(refused.starts_with("refused Quota"), "{refused}");
        std::thread::sleep(Duration::from_millis(100));
    }
    drop(parked);
    let opened = open_retrying(&mut tenant, "weights", 3 * GIB);
    assert!(matches!(opened, Ok(Opened::Write { .. })), "{opened:?}");
}

#[tokio::test]
async fn discarded_lease_is_charged_until_no_process_maps_it() {
    let sibling = |tenant: &mut Tenant, lease| {
        let holder = tenant.ask(&format!("park {lease}")).unwrap();
        Some(ParkedHolder(holder.parse().unwrap()))
    };
    charged_while_held(sibling).await;
}

#[tokio::test]
async fn descriptor_in_flight_keeps_discarded_memory_charged() {
    let queue = |tenant: &mut Tenant, lease| {
        let holder = tenant.ask(&format!("queue {lease}")).unwrap();
        Some(ParkedHolder(holder.parse().unwrap()))
    };
    charged_while_held(queue).await;
}

#[tokio::test]
async fn io_uring_reference_keeps_discarded_memory_charged() {
    let (_folder, program) = compile_c("ring.c");
    let ring = |tenant: &mut Tenant, lease| {
        let answer = tenant.ask(&format!("ring {lease} {}", program.display()));
        let answer = answer.unwrap();
        Some(ParkedHolder(
            answer.strip_prefix("holds ")?.parse().unwrap(),
        ))
    };
    charged_while_held(ring).await;
}
