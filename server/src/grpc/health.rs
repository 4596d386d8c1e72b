//! What the server says of itself to those who ask whether it serves: over gRPC, of the server and of each service.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::state::ServerState;
use kvarts_wire::proto;

/// How often it is looked whether the store is well.
const EVERY: Duration = Duration::from_secs(1);

/// What can be asked about: the server, and its services.
const NAMES: [&str; 5] = [
    "",
    proto::models_server::SERVICE_NAME,
    proto::store_server::SERVICE_NAME,
    proto::reads_server::SERVICE_NAME,
    proto::admin_server::SERVICE_NAME,
];

/// Says it until dropped, and writes into the log when it changes.
pub(super) async fn keep(state: Arc<ServerState>, reporter: HealthReporter) -> Infallible {
    let mut said = None;
    loop {
        let fault = state.fault();
        if said.as_ref() != Some(&fault) {
            let status = if fault.is_none() { ServingStatus::Serving } else { ServingStatus::NotServing };
            for name in NAMES {
                reporter.set_service_status(name, status).await;
            }
            match (&fault, &said) {
                (Some(reason), _) if state.is_draining() => tracing::info!(reason, "not serving any more"),
                (Some(reason), _) => tracing::error!(reason, "the store is not well"),
                (None, Some(_)) => tracing::info!("the store is healthy again"),
                (None, None) => {}
            }
            said = Some(fault);
        }
        match state.is_draining() {
            true => tokio::time::sleep(EVERY).await,
            false => drop(tokio::time::timeout(EVERY, state.drain_asked()).await),
        }
    }
}
