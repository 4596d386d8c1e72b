//! Those that say the first words of a node, and then what a test wants.

use kvarts_cluster::members::NodeId;
use kvarts_contract::clock::OsEntropy;
use kvarts_peer::node::{Greeting, Secret};
use kvarts_wire::proto::nodes_client::NodesClient;
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::{Stream, StreamExt};
use tonic::transport::{Channel, Endpoint, Error};

/// What nodes of tests know.
pub const SECRET: &[u8] = b"a secret of tests";

pub fn greeting(me: NodeId, secret: &[u8]) -> Greeting {
    Greeting { secret: Secret::new(secret), me, entropy: OsEntropy::new() }
}

/// Calls to a node at this address, by one that says it is `me`.
pub async fn calls(
    me: NodeId,
    secret: &[u8],
    (address, to): (String, NodeId),
) -> Result<NodesClient<Channel>, Error> {
    let greeting = greeting(me, secret);
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let connector = tower::service_fn(move |_| {
        let (address, greeting) = (address.clone(), greeting.clone());
        async move {
            let mut stream = TcpStream::connect(&address).await?;
            greeting.call(&mut stream, to).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    });
    endpoint.connect_with_connector(connector).await.map(NodesClient::new)
}

/// Connections to one that says it is `me`.
pub fn called(me: NodeId, listener: TcpListener) -> impl Stream<Item = std::io::Result<TcpStream>> {
    let greeting = greeting(me, SECRET);
    tokio_stream::wrappers::TcpListenerStream::new(listener).then(move |stream| {
        let greeting = greeting.clone();
        async move {
            let mut stream = stream?;
            greeting.answer(&mut stream, |_| true).await?;
            Ok(stream)
        }
    })
}
