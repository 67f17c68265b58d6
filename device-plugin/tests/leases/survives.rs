//! Tests which processes retained memory outlives.

use rustix::process::{Signal, kill_process};

use crate::common::eventually;
use crate::fixture::{Fixture, GIB, assert_unscrubbed, open_retrying, read_lease};
use crate::tenant_process::Opened;
use crate::tokens::start_pod_of_other_namespace;

#[tokio::test]
async fn lease_survives_writer_provisioner_and_agent_restarts() {
    let mut fixture = Fixture::new().await;
    fixture.machine.run("full", 16).await;
    let (first, second) = (
        fixture.machine.run("a", 8).await,
        fixture.machine.run("b", 4).await,
    );
    let mut writer = fixture.tenant(&first);
    assert!(
        open_retrying(&mut writer, "none", 0)
            .unwrap_err()
            .contains("Missing")
    );
    let Opened::Write { lease, token } = open_retrying(&mut writer, "weights", 2 * GIB).unwrap()
    else {
        panic!("it is there");
    };
    let mut other = fixture.tenant(&second);
    let waits = other.open("weights", 2 * GIB).unwrap_err();
    assert!(waits.contains("Writing"), "{waits}");
    assert_eq!(writer.commit(lease, token, 42), "committed");
    writer.kill();
    assert_eq!(read_lease(&mut other, "weights"), (lease, 42));
    let foreign = start_pod_of_other_namespace(&fixture, "c").await;
    let (_, gpu) = fixture.allocation_and_gpu(&first);
    assert_eq!(
        fixture.allocation_and_gpu(&foreign).1,
        gpu,
        "it could be found there"
    );
    let missing = open_retrying(&mut fixture.tenant(&foreign), "weights", 0).unwrap_err();
    assert!(missing.contains("Missing"), "{missing}");
    fixture.kill_provisioners();
    fixture.machine.restart_agent().await;
    let mut next = fixture.tenant(&first);
    assert_eq!(read_lease(&mut next, "weights"), (lease, 42));
    next.exec();
    fixture.connect_tenant(&first, &mut next);
    assert_eq!(read_lease(&mut next, "weights"), (lease, 42));
}

#[tokio::test]
async fn uncommitted_lease_is_discarded_when_its_writer_ends() {
    let fixture = Fixture::new().await;
    let pod = fixture.machine.run("a", 8).await;
    let mut first = fixture.tenant(&pod);
    let Opened::Write {
        lease: first_lease, ..
    } = open_retrying(&mut first, "weights", 6 * GIB).unwrap()
    else {
        panic!("it is there");
    };
    first.kill();
    let mut second = fixture.tenant(&pod);
    let Opened::Write {
        lease: second_lease,
        ..
    } = open_retrying(&mut second, "weights", 6 * GIB).unwrap()
    else {
        panic!("it is there");
    };
    assert!(second_lease > first_lease, "its generation grows");
    second.exec();
    fixture.connect_tenant(&pod, &mut second);
    let Opened::Write {
        lease: third_lease, ..
    } = open_retrying(&mut second, "weights", 6 * GIB).unwrap()
    else {
        panic!("it is there");
    };
    assert!(third_lease > second_lease);
}

#[tokio::test]
async fn fd_store_that_a_signal_stopped_is_continued_and_keeps_its_leases() {
    let fixture = Fixture::new().await;
    let pod = fixture.machine.run("a", 8).await;
    let mut writer = fixture.tenant(&pod);
    let Ok(Opened::Write { lease, token }) = open_retrying(&mut writer, "weights", 2 * GIB) else {
        panic!("it is there");
    };
    assert_eq!(writer.commit(lease, token, 7), "committed");
    // The fd store has no calls now: the agent finds by its own question that it has stopped.
    kill_process(fixture.fdstore_pid(), Signal::STOP).unwrap();
    let told = || {
        fixture
            .machine
            .log()
            .contains("the fd store does not answer: sent it SIGCONT")
    };
    eventually("the agent continued it", told).await;
    assert_eq!(read_lease(&mut fixture.tenant(&pod), "weights"), (lease, 7));
    // A call that the stop meets fails, and the agent continues the fd store as well.
    kill_process(fixture.fdstore_pid(), Signal::STOP).unwrap();
    assert_eq!(read_lease(&mut fixture.tenant(&pod), "weights"), (lease, 7));
}

#[tokio::test]
async fn lost_fd_store_restarts_leases_in_a_higher_generation() {
    let mut fixture = Fixture::new().await;
    let pod = fixture.machine.run("a", 8).await;
    let mut writer = fixture.tenant(&pod);
    let Ok(Opened::Write { lease, token }) = open_retrying(&mut writer, "weights", 6 * GIB) else {
        panic!("it is there");
    };
    assert_eq!(writer.commit(lease, token, 1), "committed");
    writer.kill();
    fixture.kill_fdstore();
    fixture.start_fdstore();
    let mut next = fixture.tenant(&pod);
    let Ok(Opened::Write { lease: anew, .. }) = open_retrying(&mut next, "weights", 6 * GIB) else {
        panic!("what is lost is not there");
    };
    assert!(anew > lease);
}

#[tokio::test]
async fn leases_are_refused_when_the_driver_does_not_scrub() {
    let config = format!("scrub = false\n{}", crate::machine::TWO_GPUS);
    let mut fixture = Fixture::with_driver(&config).await;
    fixture.start_fdstore();
    let pod = fixture.machine.run("a", 8).await;
    let mut tenant = fixture.tenant(&pod);
    assert_unscrubbed(&mut tenant);
}
