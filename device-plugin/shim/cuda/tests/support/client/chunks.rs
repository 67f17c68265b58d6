//! Calls that cut pieces from the driver's chunks, and others that take memory unseen.
//!
//! ```text
//! pieces COUNT BYTES -> ok COUNT CODE      (allocates and keeps as many as it gets)
//! sizes COUNT STEP   -> ok COUNT CODE      (one of each multiple)
//! thin               -> ok                 (frees all but the first piece in each 2 MiB)
//! halve              -> ok                 (frees every second piece)
//! drop               -> ok                 (frees the rest)
//! mix SEED THREADS CALLS OTHER -> ok       (threads allocate and free each other's pieces, in
//!                                          this context and in OTHER)
//! setcurrent CONTEXT -> ok | err CODE
//! nodes COUNT CHAINS -> ok GRAPH | err CODE (a graph of kernels)
//! heap BYTES         -> ok BYTES | err CODE (the limit of device-side malloc; what it is then)
//! device-variable BYTES -> ok MODULE | err CODE
//! device-global MODULE  -> ok POINTER BYTES | err CODE
//! ```

use std::collections::BTreeSet;
use std::sync::Mutex;

use super::{Cuda, answer, say};
use crate::storm::rng::Rng;

const CHUNK: u64 = 2 << 20;

static PIECES: Mutex<Vec<u64>> = Mutex::new(Vec::new());

fn pieces() -> std::sync::MutexGuard<'static, Vec<u64>> {
    PIECES.lock().expect("no panic")
}

/// Runs one line, if it is a command of this module.
pub(super) fn run(cuda: &Cuda, words: &[&str]) -> Option<String> {
    let number = |index: usize| words[index].parse::<u64>().expect("a number");
    Some(match words[0] {
        "pieces" => keep(cuda, (0..number(1)).map(|_| number(2))),
        "sizes" => keep(cuda, (1..=number(1)).map(|place| place * number(2))),
        "thin" => {
            let mut seen = BTreeSet::new();
            free_all_but(cuda, |_, pointer| seen.insert(pointer / CHUNK))
        }
        "halve" => free_all_but(cuda, |place, _| place % 2 == 1),
        "drop" => free_all_but(cuda, |_, _| false),
        "mix" => mix(cuda, number(1), number(2), number(3), number(4)),
        "setcurrent" => {
            let code = call!(cuda, c"cuCtxSetCurrent", (number(1) => u64));
            say(answer(code, String::new()))
        }
        "nodes" => say(graph(cuda, number(1), number(2)).map(|graph| graph.to_string())),
        "heap" => {
            let mut now = 0_u64;
            let code = call!(cuda, c"cuCtxSetLimit", (2 => i32, number(1) => u64));
            call!(cuda, c"cuCtxGetLimit", (&raw mut now => *mut u64, 2 => i32));
            say(answer(code, now.to_string()))
        }
        "device-variable" => {
            let (mut module, image) = (0_u64, format!("device {}\0", number(1)));
            let code = call!(cuda, c"cuModuleLoadData", (
                &raw mut module => *mut u64, image.as_ptr() => *const u8
            ));
            say(answer(code, module.to_string()))
        }
        "device-global" => {
            let (mut pointer, mut bytes) = (0_u64, 0_u64);
            let code = call!(cuda, c"cuModuleGetGlobal_v2", (
                &raw mut pointer => *mut u64, &raw mut bytes => *mut u64, number(1) => u64,
                c"device".as_ptr() => *const libc::c_char
            ));
            say(answer(code, format!("{pointer} {bytes}")))
        }
        _ => return None,
    })
}

fn keep(cuda: &Cuda, sizes: impl Iterator<Item = u64>) -> String {
    let mut count = 0;
    for bytes in sizes {
        match cuda.alloc(bytes) {
            Ok(pointer) => pieces().push(pointer),
            Err(code) => return format!("ok {count} {code}"),
        }
        count += 1;
    }
    format!("ok {count} 0")
}

fn free_all_but(cuda: &Cuda, mut is_kept: impl FnMut(usize, u64) -> bool) -> String {
    let all = std::mem::take(&mut *pieces());
    for (place, pointer) in all.into_iter().enumerate() {
        match is_kept(place, pointer) {
            true => pieces().push(pointer),
            false => assert_eq!(cuda.free(pointer), 0),
        }
    }
    "ok".to_owned()
}

fn mix(cuda: &Cuda, seed: u64, threads: u64, calls: u64, other: u64) -> String {
    let own = cuda.current().expect("no error");
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut rng = Rng::seeded(seed * 1000 + thread);
                for _ in 0..calls {
                    let context = if rng.below(2) == 0 { own } else { other };
                    assert_eq!(call!(cuda, c"cuCtxSetCurrent", (context => u64)), 0);
                    if rng.below(5) < 3 {
                        // Sizes of all magnitudes, some of whole chunks.
                        let most = 512 << rng.below(13);
                        if let Ok(pointer) = cuda.alloc(1 + rng.below(most)) {
                            pieces().push(pointer);
                        }
                        continue;
                    }
                    let chosen = {
                        let mut pieces = pieces();
                        let count = pieces.len() as u64;
                        (count > 0).then(|| pieces.swap_remove(rng.below(count) as usize))
                    };
                    if let Some(pointer) = chosen {
                        let code = match rng.below(2) {
                            0 => cuda.free(pointer),
                            _ => call!(cuda, c"cuMemFreeAsync", (pointer => u64, 0 => u64)),
                        };
                        assert_eq!(code, 0);
                    }
                }
            });
        }
    });
    assert_eq!(call!(cuda, c"cuCtxSetCurrent", (own => u64)), 0);
    "ok".to_owned()
}

fn graph(cuda: &Cuda, count: u64, chains: u64) -> Result<u64, i32> {
    let mut graph = 0_u64;
    let mut code = call!(cuda, c"cuGraphCreate", (&raw mut graph => *mut u64, 0 => u32));
    let (mut nodes, parameters) = (Vec::new(), [0_u64; 7]);
    for number in 0..count {
        let (mut node, before) = (0_u64, number.checked_sub(chains));
        let last = before.map_or(0, |place| nodes[place as usize]);
        code = code.max(call!(cuda, c"cuGraphAddKernelNode", (
            &raw mut node => *mut u64, graph => u64, &raw const last => *const u64,
            u64::from(before.is_some()) => u64, parameters.as_ptr() => *const u64
        )));
        nodes.push(node);
    }
    answer(code, graph)
}
