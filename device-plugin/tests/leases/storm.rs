//! Tenants that keep and read, while they, the workers, the agent and the vault are killed at any moment.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::bed::{Bed, GIB, open, passes};
use crate::tenant::{Opened, Tenant};

const ROUNDS: u32 = 250;

/// What a name must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Promised {
    /// The last commit or discard was not answered.
    Either,
    Content(u64, u64),
}

#[tokio::test]
async fn acknowledged_commits_last_through_every_death_but_the_vaults_and_in_the_end_all_is_free() {
    let mut bed = Bed::new().await;
    bed.machine.run("full", 16).await;
    let mut pods = [bed.machine.run("a", 6).await, bed.machine.run("b", 6).await];
    let mut dice = StdRng::seed_from_u64(3);
    let mut tenants: Vec<Tenant> = pods.iter().map(|pod| bed.tenant(pod)).collect();
    let mut promised: BTreeMap<&str, Promised> = BTreeMap::new();
    let (mut commits, mut reads, mut deaths) = (0, 0, [0; 5]);
    for round in 0..ROUNDS {
        match dice.random_range(0..100) {
            0..10 => {
                let at = dice.random_range(0..pods.len());
                // What it was writing is discarded.
                tenants[at] = bed.tenant(&pods[at]);
                deaths[0] += 1;
            }
            10..14 => deaths[1] += bed.kill_workers(),
            14..17 => {
                bed.machine.restart_agent().await;
                deaths[2] += 1;
            }
            17..19 => {
                bed.kill_vault();
                bed.start_vault();
                promised.clear();
                deaths[3] += 1;
            }
            number => {
                let at = dice.random_range(0..pods.len());
                let name = ["x", "y", "z"][number as usize % 3];
                let tenant = &mut tenants[at];
                let bytes = u64::from(dice.random_range(1..3_u32)) * GIB;
                let before = promised.get(name).copied();
                match open(tenant, name, bytes) {
                    Ok(Opened::Ready { lease, mark }) => {
                        assert_ne!(before, None, "{name} was never committed");
                        if let Some(Promised::Content(..)) = before {
                            assert_eq!(before, Some(Promised::Content(lease, mark)), "{name}");
                        }
                        promised.insert(name, Promised::Content(lease, mark));
                        reads += 1;
                        if dice.random_range(0..4) == 0 {
                            let answer = tenant.ask(&format!("discard {lease}")).unwrap();
                            match answer.as_str() {
                                "discarded" => drop(promised.remove(name)),
                                why => {
                                    assert!(passes(why) || why.contains("Missing"), "{why}");
                                    promised.insert(name, Promised::Either);
                                }
                            }
                        }
                    }
                    Ok(Opened::Write { lease, token }) => {
                        assert!(
                            !matches!(before, Some(Promised::Content(..))),
                            "{name} is lost: {before:?}"
                        );
                        let mark = u64::from(round) + 1;
                        match tenant.commit(lease, token, mark).as_str() {
                            "committed" => {
                                promised.insert(name, Promised::Content(lease, mark));
                                commits += 1;
                            }
                            why => {
                                assert!(passes(why) || why.contains("Fenced"), "{why}");
                                promised.insert(name, Promised::Either);
                            }
                        }
                    }
                    // What was discarded and the other pod has open is charged until that pod ends.
                    Err(why) if why.contains("Quota") => {
                        tenants.clear();
                        pods.iter().for_each(|pod| bed.machine.end(pod));
                        for (at, pod) in pods.iter_mut().enumerate() {
                            // What the pod's leases had is proven free first.
                            *pod = bed.machine.admit(&format!("p{round}-{at}"), 6).await;
                            bed.machine.until_started(pod).await;
                            tenants.push(bed.tenant(pod));
                        }
                        promised.clear();
                        deaths[4] += 1;
                    }
                    Err(why) => assert!(why.contains("Writing"), "{name}: {why}"),
                }
            }
        }
    }
    println!(
        "{commits} commits, {reads} reads; ends of tenants, workers, agents, vaults, all pods {deaths:?}"
    );
    assert!(commits > 10 && reads > 10 && deaths[..4].iter().all(|deaths| *deaths > 0));
    drop(tenants);
    for pod in &pods {
        bed.machine.end(pod);
    }
    let whole = bed.machine.admit("whole", 16).await;
    let begun = Instant::now();
    bed.machine.until_started(&whole).await;
    println!("all of it bound again after {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(10));
}
