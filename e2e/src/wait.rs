//! Waiting with a bound, and an error that says for what.

use std::time::{Duration, Instant};

/// A wait that outlasted its bound, or cannot succeed any more.
#[derive(Debug, thiserror::Error)]
#[error("waited {waited:.1?} for {what}: {last}")]
pub struct TimedOut {
    what: String,
    waited: Duration,
    last: String,
}

/// What one look found.
#[derive(Debug)]
pub enum Look<T> {
    /// It is there.
    Found(T),
    /// Not yet; how things stand, in words.
    NotYet(String),
    /// It cannot come any more, and why.
    Never(String),
}

/// Looks every `pause` until `look` finds something.
///
/// # Errors
/// After `bound`, or when `look` says never; with what it said last.
pub async fn until<T>(
    what: &str,
    bound: Duration,
    pause: Duration,
    mut look: impl AsyncFnMut() -> Look<T>,
) -> Result<T, TimedOut> {
    let start = Instant::now();
    let mut last = "nothing was seen".to_owned();
    loop {
        let left = bound.saturating_sub(start.elapsed());
        let done = |last: String| TimedOut {
            what: what.to_owned(),
            waited: start.elapsed(),
            last,
        };
        match tokio::time::timeout(left, look()).await {
            Ok(Look::Found(value)) => return Ok(value),
            Ok(Look::Never(why)) => return Err(done(why)),
            Ok(Look::NotYet(state)) => last = state,
            Err(_) => return Err(done(last)),
        }
        // A look that answers at once is never cut off by the timeout above.
        if start.elapsed() >= bound {
            return Err(done(last));
        }
        tokio::time::sleep(pause.min(left)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn a_bound_that_passes_tells_what_was_seen_last() {
        let look = async || Look::<()>::NotYet("node is NotReady".to_owned());
        let error = until("the node", SHORT, Duration::from_millis(1), look)
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("for the node") && error.ends_with("node is NotReady"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn what_cannot_come_is_not_waited_for() {
        let start = Instant::now();
        let look = async || Look::<()>::Never("it ended".to_owned());
        assert!(
            until("it", Duration::from_secs(60), SHORT, look)
                .await
                .is_err()
        );
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[tokio::test]
    async fn a_look_that_hangs_is_cut_off() {
        let look = async || std::future::pending::<Look<()>>().await;
        assert!(until("it", SHORT, SHORT, look).await.is_err());
    }
}
