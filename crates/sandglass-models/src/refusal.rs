//! How a client is told no, in the words of its own protocol.
//!
//! Agents take most errors for bad luck and ask again, some for minutes. What they end at was measured with their releases of
//! November 2026: 402 with `x-should-retry: false` (Claude Code), 429 of the type `insufficient_quota` (Codex).

use http::StatusCode;
use serde_json::{Value, json};

use crate::dialect::Dialect;

/// Why a call is not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// What is left of the budget does not do. Nothing will change that.
    Budget,
    /// The token is unknown, expired or revoked.
    Token,
    /// The token is not for this model, or for this operation.
    Forbidden,
    /// No model is called so, or it has no price.
    Model,
    /// The request can't be sent as it is.
    Request,
    /// Too many calls at the same time, or within a time. Later it may work.
    Busy,
    /// The provider does not answer.
    Upstream,
}

/// An answer that says no.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// Its status.
    pub status: StatusCode,
    /// Its body.
    pub body: Value,
    /// What to send as `x-should-retry`.
    pub retry: bool,
}

/// The answer to a call that is not sent.
#[must_use]
pub fn refusal(dialect: Dialect, why: Why, message: &str) -> Refusal {
    let anthropic = dialect == Dialect::Messages;
    let (status, kind) = match (why, anthropic) {
        (Why::Budget, true) => (StatusCode::PAYMENT_REQUIRED, "billing_error"),
        (Why::Budget, false) => (StatusCode::TOO_MANY_REQUESTS, "insufficient_quota"),
        (Why::Token, true) => (StatusCode::UNAUTHORIZED, "authentication_error"),
        (Why::Token, false) => (StatusCode::UNAUTHORIZED, "invalid_api_key"),
        (Why::Forbidden, true) => (StatusCode::FORBIDDEN, "permission_error"),
        (Why::Forbidden, false) => (StatusCode::FORBIDDEN, "insufficient_permissions"),
        (Why::Model, true) => (StatusCode::NOT_FOUND, "not_found_error"),
        (Why::Model, false) => (StatusCode::NOT_FOUND, "model_not_found"),
        (Why::Request, _) => (StatusCode::BAD_REQUEST, "invalid_request_error"),
        (Why::Busy, true) => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error"),
        (Why::Busy, false) => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded"),
        (Why::Upstream, true) => (StatusCode::BAD_GATEWAY, "api_error"),
        (Why::Upstream, false) => (StatusCode::BAD_GATEWAY, "server_error"),
    };
    let body = if anthropic {
        json!({"type": "error", "error": {"type": kind, "message": message}})
    } else {
        json!({"error": {"message": message, "type": kind, "code": kind, "param": null}})
    };
    Refusal { status, body, retry: matches!(why, Why::Busy | Why::Upstream) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_budget_ends_it_in_every_dialect() {
        for dialect in Dialect::ALL {
            let no = refusal(dialect, Why::Budget, "spent");
            assert!(!no.retry);
            let expected = if dialect == Dialect::Messages {
                (402, "billing_error")
            } else {
                (429, "insufficient_quota")
            };
            assert_eq!((no.status.as_u16(), no.body["error"]["type"].as_str().unwrap()), expected);
            assert_eq!(no.body["error"]["message"], "spent");
        }
        assert_eq!(refusal(Dialect::Chat, Why::Budget, "").body["error"]["code"], "insufficient_quota");
        assert!(refusal(Dialect::Responses, Why::Busy, "").retry);
    }
}
