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
const NAMES: [&str; 8] = [
    "",
    proto::models_server::SERVICE_NAME,
    proto::store_server::SERVICE_NAME,
    proto::reads_server::SERVICE_NAME,
    proto::directory_server::SERVICE_NAME,
    proto::sessions_server::SERVICE_NAME,
    proto::plans_server::SERVICE_NAME,
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
                (Some(reason), _) if state.is_leaving() => tracing::info!(
                    reason,
                    "the health check returns \
                    NOT_SERVING"
                ),
                (Some(reason), _) => tracing::error!(reason, "the store has a problem"),
                (None, Some(_)) => tracing::info!("the store is healthy again"),
                (None, None) => {}
            }
            said = Some(fault);
        }
        match state.is_leaving() {
            true => tokio::time::sleep(EVERY).await,
            false => drop(tokio::time::timeout(EVERY, state.leave_asked()).await),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::calls::methods::METHODS;

    #[test]
    fn each_service_with_a_method_can_be_asked_about() {
        let service = |path: &&'static str| path.split('/').nth(1).unwrap();
        let served: BTreeSet<&str> = METHODS.iter().map(|method| service(&method.path)).collect();
        let told: BTreeSet<&str> = NAMES.into_iter().filter(|name| !name.is_empty()).collect();
        assert_eq!(told, served);
        assert!(NAMES.contains(&""), "the server as a whole");
    }
}
