//! Waiting with a bound, and an error that says for what.

use std::time::{Duration, Instant};

/// A wait that outlasted its bound, or cannot succeed any more.
#[derive(Debug, thiserror::Error)]
#[error("waited {waited:.1?} for {what}: {last}")]
pub struct WaitError {
    what: String,
    waited: Duration,
    last: String,
}

/// What one look found.
#[derive(Debug)]
pub enum Poll<T> {
    /// It is there.
    Ready(T),
    /// Not yet; how things stand, in words.
    Pending(String),
    /// It cannot come any more, and why.
    Failed(String),
}

/// Looks every `pause` until `look` finds something.
///
/// # Errors
/// After `bound`, or when `look` says never; with what it said last.
pub async fn poll_until<T>(
    what: &str,
    bound: Duration,
    pause: Duration,
    mut look: impl AsyncFnMut() -> Poll<T>,
) -> Result<T, WaitError> {
    let start = Instant::now();
    let mut last = "nothing was seen".to_owned();
    loop {
        let left = bound.saturating_sub(start.elapsed());
        let done = |last: String| WaitError {
            what: what.to_owned(),
            waited: start.elapsed(),
            last,
        };
        match tokio::time::timeout(left, look()).await {
            Ok(Poll::Ready(value)) => return Ok(value),
            Ok(Poll::Failed(why)) => return Err(done(why)),
            Ok(Poll::Pending(state)) => last = state,
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
    async fn timeout_reports_the_last_pending_state() {
        let look = async || Poll::<()>::Pending("node is NotReady".to_owned());
        let error = poll_until("the node", SHORT, Duration::from_millis(1), look)
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("for the node") && error.ends_with("node is NotReady"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn failed_poll_ends_the_wait_at_once() {
        let start = Instant::now();
        let look = async || Poll::<()>::Failed("it ended".to_owned());
        assert!(
            poll_until("it", Duration::from_secs(60), SHORT, look)
                .await
                .is_err()
        );
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[tokio::test]
    async fn hanging_poll_is_cut_off_at_the_timeout() {
        let look = async || std::future::pending::<Poll<()>>().await;
        assert!(poll_until("it", SHORT, SHORT, look).await.is_err());
    }
}
