//! Ends the program on SIGTERM and SIGINT, also as process 1 of a container.

use std::sync::atomic::{AtomicU8, Ordering};

use tokio::signal::unix::{SignalKind, signal};

static EXIT_CODE: AtomicU8 = AtomicU8::new(0);

/// Sets the exit code after a signal; 0 by default.
pub(crate) fn set_exit_code(code: u8) {
    EXIT_CODE.store(code, Ordering::Relaxed);
}

/// Installs the signal handlers. Either signal ends the process at any point, and the driver frees
/// the memory.
///
/// # Errors
/// The system refuses a thread or a handler.
pub(crate) fn exit_on_signals() -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (mut term, mut int) = {
        let _entered = runtime.enter();
        (
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
        )
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = int.recv() => {}
                }
            });
            std::process::exit(EXIT_CODE.load(Ordering::Relaxed).into());
        })?;
    Ok(())
}
