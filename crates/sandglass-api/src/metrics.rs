//! What clients ask of this server, counted for its operator.

use std::fmt;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, StatusCode};
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use sandglass_control::metrics::PREFIX;
use sandglass_types::Error;
use tokio::sync::watch;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::auth::Operator;
use crate::error::{ApiError, ErrorBody};
use crate::router::ApiState;
use crate::server::Certificate;

/// Bounds of the buckets, in seconds.
const SECONDS: [f64; 10] = [0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

/// How a request was answered. Methods and routes are those that this server has, so there are few.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    method: String,
    route: String,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Asked {
    method: String,
    route: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Status {
    status: u16,
}

/// What is counted as it happens.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Answered, Counter>,
    seconds: Family<Asked, Histogram, fn() -> Histogram>,
    forwarded: Family<Status, Counter>,
}

/// When the certificate expires that is shown at the moment.
#[derive(Debug)]
struct Expires(watch::Receiver<Certificate>);

impl EncodeMetric for Expires {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_gauge(&self.0.borrow().expires().as_second())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

impl Metrics {
    /// `certificate` is the server's, if it has one.
    pub(crate) fn new(certificate: Option<watch::Receiver<Certificate>>) -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        if let Some(certificate) = certificate {
            let expires = Expires(certificate);
            registry.register(
                "certificate_expires",
                "When the certificate does, in seconds since 1970",
                expires,
            );
        }
        let (requests, forwarded) = (Family::default(), Family::default());
        let seconds: Family<Asked, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(SECONDS));
        registry.register("api_requests", "Requests to the API, by route and status", requests.clone());
        registry.register_with_unit(
            "api_request",
            "From a request to the API to the head of its answer",
            Unit::Seconds,
            seconds.clone(),
        );
        registry.register("edge_requests", "Requests to ports of sandboxes, by status", forwarded.clone());
        Self { registry, requests, seconds, forwarded }
    }

    /// The API answered. `route` is one of its own, if the request has one.
    pub(crate) fn answered(&self, method: &Method, route: Option<&str>, status: StatusCode, took: Duration) {
        // Without a route, the method too is whatever a client wrote.
        let (method, route) = route.map_or(("-", "-"), |route| (method.as_str(), route));
        let asked = Asked { method: method.to_owned(), route: route.to_owned() };
        self.seconds.get_or_create(&asked).observe(took.as_secs_f64());
        let Asked { method, route } = asked;
        self.requests.get_or_create(&Answered { method, route, status: status.as_u16() }).inc();
    }

    /// The edge answered, or a sandbox through it.
    pub(crate) fn forwarded(&self, status: StatusCode) {
        // A sandbox may answer with any number.
        let status = if status.is_success() { 200 } else { status.as_u16() / 100 * 100 };
        self.forwarded.get_or_create(&Status { status }).inc();
    }
}

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(metrics))
}

#[utoipa::path(get, path = "/metrics", tag = "native", responses(
    (status = 200, description = "The state of this server in the text of OpenMetrics; for keys of operators",
     content_type = "application/openmetrics-text", body = String),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn metrics(State(state): State<ApiState>, _: Operator) -> Result<Response, ApiError> {
    let mut text = String::new();
    state.backend.metrics(&mut text).await?;
    encode_registry(&mut text, &state.metrics.registry)
        .and_then(|()| encode_eof(&mut text))
        .map_err(|error| Error::internal("the metrics can't be written", error))?;
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    Ok(([(CONTENT_TYPE, kind)], text).into_response())
}
