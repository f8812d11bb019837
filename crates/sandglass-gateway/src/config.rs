//! What an operator decides of calls.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue, Uri};
use sandglass_egress::resolver::Resolve;
use sandglass_models::Dialect;
use sandglass_models::token::Signer;
use sandglass_models::totals::Totals;
use sandglass_store::SpendCaps;
use secrecy::SecretString;

/// All of it.
#[derive(Debug, Clone)]
pub struct Config {
    /// Who runs the models, by their names in the table of prices.
    pub providers: BTreeMap<String, Provider>,
    /// Knows the tokens of this server.
    pub signer: Signer,
    /// What calls may take.
    pub limits: Limits,
    /// What each team may spend.
    pub caps: Caps,
    /// How long is waited.
    pub waits: Waits,
    /// Turns the names of providers into addresses.
    pub resolver: Arc<dyn Resolve>,
    /// Whom providers may be vouched for by.
    pub tls: rustls::ClientConfig,
    /// Where everything is counted.
    pub totals: Arc<Totals>,
}

/// Who runs models.
#[derive(Debug, Clone)]
pub struct Provider {
    /// Where: a scheme, a host, and perhaps the beginning of a path.
    pub base: Uri,
    /// Which protocols it speaks.
    pub dialects: Vec<Dialect>,
    /// What it knows this server by.
    pub key: Option<Key>,
    /// What else every call carries.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

/// The key of a provider. It goes to that provider alone.
#[derive(Debug, Clone)]
pub struct Key {
    /// The key.
    pub secret: SecretString,
    /// The header that carries it, where that is not the one of the protocol: `x-api-key` of Anthropic's, and a bearer token of the others.
    pub header: Option<HeaderName>,
}

/// What calls may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Tokens that a call may write, whatever its client and its model say.
    pub output: u64,
    /// Calls of one budget at a time.
    pub at_once: usize,
    /// Calls of one budget in a minute, and at once after a silence.
    pub per_minute: NonZeroU32,
    /// Calls of all budgets at a time, those included that are heard to their end without their client. One team may make half of them.
    pub together: usize,
}

/// What teams may spend.
#[derive(Debug, Clone, Default)]
pub struct Caps {
    /// Each, unless it is said otherwise.
    pub each: SpendCaps,
    /// By name.
    pub teams: HashMap<String, SpendCaps>,
}

/// How long is waited.
#[derive(Debug, Clone, Copy)]
pub struct Waits {
    /// For a call's turn.
    pub turn: Duration,
    /// For money that other calls of the budget have set aside, most of which comes back when they end.
    pub money: Duration,
    /// For the body of a call.
    pub body: Duration,
    /// For a provider to take a connection.
    pub connect: Duration,
    /// For the next byte of a provider, the first included: models think.
    pub provider: Duration,
    /// For the end of an answer whose client is gone.
    pub drain: Duration,
    /// For a client to take more of its answer.
    pub client: Duration,
    /// For all of an answer, however steadily it comes and is taken.
    pub call: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        let [turn, money, body, connect, provider, drain, client, call] =
            [2, 30, 30, 10, 600, 300, 60, 3600].map(Duration::from_secs);
        Self { turn, money, body, connect, provider, drain, client, call }
    }
}
