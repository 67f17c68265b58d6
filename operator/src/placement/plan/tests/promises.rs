//! What a cohort is promised, over random budgets, nodes and pods: both plans act on one cluster.

use bursar_crds::GpuMemoryBudget;
use bursar_crds::conditions::budget as names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::*;
use crate::budget::{self, Quota};
use crate::demand::Demand;
use crate::world::{Change, Claim, Gpus, Offer, World};

/// The last second in which pods come, and how long nothing may happen until it is at rest: an owner's second pause.
const LAST: u64 = 30;
const REST: u64 = 21;

/// Namespaces that share the nodes of one cohort.
struct Cohort {
    live: Cluster,
    /// Their guarantees, and their limits.
    bounds: Vec<(u64, u64)>,
    budgets: Vec<GpuMemoryBudget>,
    world: World,
    /// Since when pods are there.
    created: BTreeMap<String, u64>,
    /// Who went for a budget that was exceeded.
    repaired: BTreeSet<String>,
    /// The namespaces in which a quota let in too much.
    slipped: BTreeSet<usize>,
}

fn name(team: usize) -> String {
    format!("t{team}")
}

/// Whose a pod is.
fn team(uid: &str) -> usize {
    usize::from(uid.as_bytes()[1] - b'0')
}

fn key(namespace: &str, name: &str) -> Key {
    Key {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}

impl Cohort {
    fn new(nodes: &[Vec<u64>], budgets: &[(u64, u64)]) -> Self {
        let mut world = World::new(Quantum::Gib1);
        let mut live = Cluster {
            all_return: true,
            preempts: true,
            ..Cluster::default()
        };
        for (number, gpus) in nodes.iter().enumerate() {
            let name = format!("node{number}");
            live = live.node(&name, gpus);
            let gpus = Gpus {
                offer: Some(Offer::Counted(Quanta::new(gpus.iter().sum()))),
                ..Gpus::default()
            };
            world.apply(Change::GpuNode(Event::Apply((key("", &name), Some(gpus)))));
        }
        let bounds: Vec<_> = budgets
            .iter()
            .map(|(guaranteed, more)| (*guaranteed, guaranteed + more))
            .collect();
        let budgets = bounds.iter().enumerate().map(|(number, (guaranteed, limit))| {
            let budget = json!({
                "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
                "metadata": { "name": "default", "namespace": name(number), "uid": name(number), "generation": 1 },
                "spec": { "deviceMemory": { "guaranteed": format!("{guaranteed}Gi"), "limit": format!("{limit}Gi") } },
            });
            serde_json::from_value(budget).unwrap()
        });
        let budgets: Vec<GpuMemoryBudget> = budgets.collect();
        for budget in &budgets {
            let claim = Claim::of(budget, Quantum::Gib1);
            world.apply(Change::Budget(Event::Apply((Key::of(budget), Some(claim)))));
        }
        Self {
            live,
            bounds,
            budgets,
            world,
            created: BTreeMap::new(),
            repaired: BTreeSet::new(),
            slipped: BTreeSet::new(),
        }
    }

    /// What a namespace's pods ask for: the guaranteed ones, and all.
    fn asked(&self, of: usize) -> (u64, u64) {
        let pods = self.live.pods.iter().filter(|(uid, _)| team(uid) == of);
        pods.fold((0, 0), |(guaranteed, all), (_, pod)| {
            let owns = u64::from(pod.priority != BORROWED);
            (guaranteed + owns * pod.asks, all + pod.asks)
        })
    }

    fn fits(&self, of: usize, asks: u64, borrows: bool) -> bool {
        let ((guaranteed, all), (guarantee, limit)) = (self.asked(of), self.bounds[of]);
        all + asks <= limit && (borrows || guaranteed + asks <= guarantee)
    }

    /// A pod is made. Its quotas refuse it, or count too late.
    fn create(&mut self, uid: &str, asks: u64, borrows: bool, slips: bool) {
        let fits = self.fits(team(uid), asks, borrows);
        if !fits && slips {
            self.slipped.insert(team(uid));
        }
        if fits || slips {
            let priority = if borrows { BORROWED } else { GUARANTEED };
            self.live = std::mem::take(&mut self.live).pod(uid, asks, priority, None);
        }
    }

    /// One look at each budget.
    fn look(&mut self, now: Moment) {
        let mut gone = std::mem::take(&mut self.created);
        for (uid, pod) in &self.live.pods {
            let created = gone.remove(uid).unwrap_or(now.as_secs());
            self.created.insert(uid.clone(), created);
            let demand = Demand {
                uid: uid.clone(),
                created: wall(Duration::from_secs(created)),
                ending: pod.ending,
                job: None,
                replaced: true,
                class: match pod.priority {
                    BORROWED => Class::Borrowed,
                    _ => Class::Guaranteed,
                },
                device: Quanta::new(pod.asks),
                managed: Quanta::ZERO,
            };
            let key = key(&name(team(uid)), uid);
            self.world
                .apply(Change::Pod(Event::Apply((key, Some(demand)))));
        }
        for uid in gone.into_keys() {
            let key = key(&name(team(&uid)), &uid);
            self.world.apply(Change::Pod(Event::Delete((key, None))));
        }
        for (number, budget) in self.budgets.iter_mut().enumerate() {
            let namespace = name(number);
            let facts = self.world.facts(&namespace, &budget.spec.cohort);
            let plan = budget::plan(budget, &facts, &Time(wall(now)));
            for step in plan.steps {
                match step {
                    budget::Step::Quota(which, cap) => {
                        let in_force = cap.hard.clone();
                        let quota = (key(&namespace, which.name()), Some(Quota { cap, in_force }));
                        self.world.apply(Change::Quota(Event::Apply(quota)));
                    }
                    budget::Step::Label => {
                        let label = (key("", &namespace), Some("enforced".to_owned()));
                        self.world.apply(Change::Namespace(Event::Apply(label)));
                    }
                    budget::Step::Status(status) => budget.status = Some(*status),
                    budget::Step::Evict { pod, .. } => {
                        self.live.pods.get_mut(&pod.uid).unwrap().ending = true;
                        self.repaired.insert(pod.uid);
                    }
                    budget::Step::LookAtJob(_) => {}
                }
            }
        }
    }

    /// Who was not to be there comes again in vain.
    fn refuse(&mut self) {
        let repaired = &self.repaired;
        self.live.pods.retain(|uid, _| {
            uid.strip_suffix('\'')
                .is_none_or(|was| !repaired.contains(was))
        });
    }

    fn holds(&self, of: usize, type_: &str) -> bool {
        let status = self.budgets[of].status.as_ref().unwrap();
        let condition = status.conditions.iter().find(|one| one.type_ == type_);
        condition.unwrap().status == "True"
    }

    /// The guaranteed pods that wait although a GPU would have room for them if all borrowers went: of their node; of
    /// any where they have none, if its quanta suffice.
    fn left_waiting(&self) -> Vec<&String> {
        let owns = |pod: &&Life| pod.priority != BORROWED;
        let cluster = &self.live;
        let one_node_covered =
            cluster.nodes.len() == 1 && self.slipped.is_empty() && self.holds(0, names::COVERED);
        let waits = cluster
            .pods
            .iter()
            .filter(|(_, pod)| owns(pod) && pod.gpu.is_none());
        let fits = |pod: &Life, node: &String| {
            let owners = cluster.pods.values().filter(owns);
            let asked: u64 = owners
                .filter(|other| other.node.as_ref() == Some(node))
                .map(|other| other.asks)
                .sum();
            let mut gpus = cluster.nodes[node].iter();
            let all: u64 = cluster.nodes[node].values().sum();
            // The guarantees of a cohort that is covered fit into its nodes together.
            (pod.node.is_some() || one_node_covered || asked + pod.asks <= all)
                && gpus.any(|(gpu, capacity)| {
                    let owners = cluster.pods.values().filter(owns);
                    let stay = owners.filter(|other| other.gpu.as_ref() == Some(gpu));
                    stay.map(|other| other.asks).sum::<u64>() + pod.asks <= *capacity
                })
        };
        let left = waits.filter(|(_, pod)| match &pod.node {
            Some(node) => fits(pod, node),
            None => cluster.nodes.keys().any(|node| fits(pod, node)),
        });
        left.map(|(uid, _)| uid).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]
    #[test]
    fn a_cohort_gets_what_it_is_promised(
        nodes in prop::collection::vec(prop::collection::vec(8_u64..20, 1..4), 1..3),
        budgets in prop::collection::vec((0_u64..25, 0_u64..40), 1..4),
        pods in prop::collection::vec(
            (10..LAST, 0_usize..3, 1_u64..12, any::<bool>(), prop::bool::weighted(0.1)), 0..24),
    ) {
        let mut cohort = Cohort::new(&nodes, &budgets);
        let (mut memory, mut quiet, mut second) = (Memory::default(), 0, 0);
        while second <= LAST || quiet < REST {
            let now = Duration::from_secs(second);
            let (before, writes) = (cohort.live.pods.clone(), cohort.live.writes);
            for (number, (at, of, asks, borrows, slips)) in pods.iter().enumerate() {
                if *at == second {
                    let uid = format!("t{}-{number}", of % budgets.len());
                    cohort.create(&uid, *asks, *borrows, *slips);
                }
            }
            cohort.look(now);
            cohort.live.run(&mut memory, second, 1);
            cohort.refuse();
            let same = cohort.live.pods == before && cohort.live.writes == writes;
            quiet = if same { quiet + 1 } else { 0 };
            second += 1;
            prop_assert!(second < 600, "it does not come to rest");
        }
        // Lending evicts borrowers only, each once, for one waiter that it is bound to, and no more than that lacks.
        let evicted = &cohort.live.evicted;
        prop_assert_eq!(evicted.iter().collect::<BTreeSet<_>>().len(), evicted.len());
        for uid in evicted {
            let number: usize = uid[3..].trim_end_matches('\'').parse().unwrap();
            prop_assert!(pods[number].3, "{} owned", uid);
        }
        for ((waiter, _), round) in &cohort.live.rounds {
            prop_assert_eq!(round.gpus.len(), 1, "{}: {:?}", waiter, round);
            let (all, least) = (round.gone.iter().sum::<u64>(), round.gone.iter().min().copied());
            prop_assert!(all - least.unwrap_or_default() < round.lacked, "{}: {:?}", waiter, round);
        }
        // What is guaranteed is not exceeded but by who slipped in, and not for long; nobody else goes for that.
        for (of, (guaranteed, limit)) in cohort.bounds.iter().enumerate() {
            let asked = cohort.asked(of);
            prop_assert!(asked.0 <= *guaranteed && asked.1 <= *limit, "{} asks for {:?}", of, asked);
            prop_assert!(!cohort.holds(of, names::EXCEEDED));
        }
        for uid in &cohort.repaired {
            prop_assert!(cohort.slipped.contains(&team(uid)), "{}", uid);
        }
        // Whose guarantee is covered, and who would have room without borrowers, is bound.
        let (offered, promised) = (nodes.iter().flatten().sum::<u64>(), cohort.bounds.iter().map(|of| of.0).sum());
        prop_assert_eq!(cohort.holds(0, names::COVERED), offered >= promised);
        let waiting = cohort.left_waiting();
        prop_assert!(waiting.is_empty(), "{:?} wait: {:?}", waiting, cohort.live);
    }
}
