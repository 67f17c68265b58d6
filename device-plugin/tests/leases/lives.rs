//! What kept memory outlives.

use crate::bed::{Bed, GIB, open, read};
use crate::tenant::Opened;
use crate::tokens::stranger;

#[tokio::test]
async fn kept_memory_outlives_its_writer_the_worker_and_the_agent_and_is_its_namespaces() {
    let mut bed = Bed::new().await;
    bed.machine.run("full", 16).await;
    let (first, second) = (bed.machine.run("a", 8).await, bed.machine.run("b", 4).await);
    let mut writer = bed.tenant(&first);
    assert!(
        open(&mut writer, "none", 0)
            .unwrap_err()
            .contains("Missing")
    );
    let Opened::Write { lease, token } = open(&mut writer, "weights", 2 * GIB).unwrap() else {
        panic!("it is there");
    };
    let mut other = bed.tenant(&second);
    let waits = other.open("weights", 2 * GIB).unwrap_err();
    assert!(waits.contains("Writing"), "{waits}");
    assert_eq!(writer.commit(lease, token, 42), "committed");
    writer.kill();
    assert_eq!(read(&mut other, "weights"), (lease, 42));
    let foreign = stranger(&bed, "c").await;
    let (_, gpu) = bed.device(&first);
    assert_eq!(bed.device(&foreign).1, gpu, "it could be found there");
    let missing = open(&mut bed.tenant(&foreign), "weights", 0).unwrap_err();
    assert!(missing.contains("Missing"), "{missing}");
    bed.kill_workers();
    bed.machine.restart_agent().await;
    let mut next = bed.tenant(&first);
    assert_eq!(read(&mut next, "weights"), (lease, 42));
    next.exec();
    bed.tell(&first, &mut next);
    assert_eq!(read(&mut next, "weights"), (lease, 42));
}

#[tokio::test]
async fn what_an_unfinished_writer_leaves_is_discarded_whether_it_dies_or_becomes_another_image() {
    let bed = Bed::new().await;
    let pod = bed.machine.run("a", 8).await;
    let mut first = bed.tenant(&pod);
    let Opened::Write { lease: one, .. } = open(&mut first, "weights", 6 * GIB).unwrap() else {
        panic!("it is there");
    };
    first.kill();
    let mut second = bed.tenant(&pod);
    let Opened::Write { lease: two, .. } = open(&mut second, "weights", 6 * GIB).unwrap() else {
        panic!("it is there");
    };
    assert!(two > one, "its generation grows");
    second.exec();
    bed.tell(&pod, &mut second);
    let Opened::Write { lease: three, .. } = open(&mut second, "weights", 6 * GIB).unwrap() else {
        panic!("it is there");
    };
    assert!(three > two);
}

#[tokio::test]
async fn with_the_vault_all_is_lost_and_begins_anew_of_a_higher_generation() {
    let mut bed = Bed::new().await;
    let pod = bed.machine.run("a", 8).await;
    let mut writer = bed.tenant(&pod);
    let Ok(Opened::Write { lease, token }) = open(&mut writer, "weights", 6 * GIB) else {
        panic!("it is there");
    };
    assert_eq!(writer.commit(lease, token, 1), "committed");
    writer.kill();
    bed.kill_vault();
    bed.start_vault();
    let mut next = bed.tenant(&pod);
    let Ok(Opened::Write { lease: anew, .. }) = open(&mut next, "weights", 6 * GIB) else {
        panic!("what is lost is not there");
    };
    assert!(anew > lease);
}

#[tokio::test]
async fn where_the_driver_does_not_clear_freed_memory_nothing_is_kept() {
    let config = format!("scrub = false\n{}", crate::machine::TWO_GPUS);
    let mut bed = Bed::with_driver(&config).await;
    bed.start_vault();
    let pod = bed.machine.run("a", 8).await;
    let mut tenant = bed.tenant(&pod);
    let refused = open(&mut tenant, "weights", GIB).unwrap_err();
    assert!(refused.contains("NotScrubbed"), "{refused}");
}
