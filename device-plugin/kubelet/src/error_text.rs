//! Formats an error with its sources on one line.

use std::error::Error;

use tonic::Status;

/// The error's text, then those of its sources that it does not show itself.
pub fn error_chain(error: &dyn Error) -> String {
    with_sources(error.to_string(), error.source())
}

/// The status's message, then the texts of its sources: a lost connection has only "transport
/// error" as its message.
pub fn status_chain(status: &Status) -> String {
    with_sources(status.message().to_owned(), status.source())
}

fn with_sources(mut text: String, mut source: Option<&(dyn Error + 'static)>) -> String {
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
