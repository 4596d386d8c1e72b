//! HTTP for `object_store`: hyper over TCP or TLS, with the TLS provider that the rest of the program has.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use http::{HeaderMap, StatusCode, Uri};
use hyper::body::{Body, Incoming};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector as Tcp};
use hyper_util::rt::{TokioExecutor, TokioIo};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
    HttpResponseBody, HttpService,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};
use tower::Service;

use crate::BadAddress;

/// Where systems keep the certificates that they trust.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// What is read of an answer that is a refusal.
const REFUSAL_BYTES: usize = 16 << 10;
/// The longest code of an error.
const CODE_BYTES: usize = 64;

/// A server's refusal: all that is kept of it. Its body may quote the request, with the key's id and the token in it, and goes no further.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// Its status.
    pub status: StatusCode,
    /// S3's code of the error; empty where it gave none.
    pub code: String,
    /// Its `Retry-After`.
    pub retry_after: Option<Duration>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.status)?;
        if self.code.is_empty() { Ok(()) } else { write!(f, ", {}", self.code) }
    }
}

impl std::error::Error for Refusal {}

impl Refusal {
    async fn of(answer: http::Response<Incoming>) -> Self {
        let retry_after = answer.headers().get(http::header::RETRY_AFTER);
        let seconds = retry_after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
        let (status, mut body, mut read) = (answer.status(), answer.into_body(), Vec::new());
        while read.len() < REFUSAL_BYTES {
            // A body that breaks off is as good as none.
            // ends: the time of its request (`patience`)
            let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
            let Some(Ok(frame)) = frame else { break };
            let Some(piece) = frame.data_ref() else { continue };
            read.extend_from_slice(piece.get(..REFUSAL_BYTES - read.len()).unwrap_or(piece));
        }
        Self { status, code: code(&read), retry_after: seconds.map(Duration::from_secs) }
    }
}

/// The code in the body of an error; empty where none is, or it is no word.
fn code(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let found = text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>"));
    let is_word =
        |code: &&str| code.len() <= CODE_BYTES && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    found.map(|(code, _)| code.trim()).filter(is_word).unwrap_or_default().to_owned()
}

/// When a bucket gave its last answer, by its own clock.
#[derive(Clone, Debug, Default)]
struct LastAnswer(Arc<AtomicU64>);

impl LastAnswer {
    fn note(&self, headers: &HeaderMap) {
        let date = headers.get(http::header::DATE).and_then(|value| value.to_str().ok());
        let date = date.and_then(|date| httpdate::parse_http_date(date).ok());
        let since = date.and_then(|date| date.duration_since(UNIX_EPOCH).ok());
        if let Some(ms) = since.and_then(|since| u64::try_from(since.as_millis()).ok()) {
            self.0.store(ms, Ordering::Relaxed);
        }
    }
}

/// Makes clients.
#[derive(Clone, Debug)]
pub struct Connector {
    tls: Arc<ClientConfig>,
    last: LastAnswer,
}

impl Connector {
    /// A connector that trusts what `SSL_CERT_FILE` names, or else what the system does.
    pub fn new() -> Result<Self, BadAddress> {
        let mut roots = RootCertStore::empty();
        let own = std::env::var("SSL_CERT_FILE").ok();
        let named = own.is_some();
        let files = own.into_iter().chain(BUNDLES.iter().filter(|_| !named).map(|file| (*file).to_owned()));
        for file in files {
            let Ok(bytes) = std::fs::read(&file) else { continue };
            for certificate in CertificateDer::pem_slice_iter(&bytes).flatten() {
                // One that cannot be used is one less; who needs it is told by the handshake.
                let _ = roots.add(certificate);
            }
            break;
        }
        let provider = Arc::new(crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(|error| BadAddress(error.to_string()))?;
        let tls = Arc::new(config.with_root_certificates(roots).with_no_client_auth());
        Ok(Self { tls, last: LastAnswer::default() })
    }

    /// When a client that it made was given its last answer, in milliseconds since 1970 by the clock of who answered.
    pub fn answered_ms(&self) -> Option<u64> {
        Some(self.last.0.load(Ordering::Relaxed)).filter(|ms| *ms > 0)
    }
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut tcp = Tcp::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let dial = Dial { tcp, tls: TlsConnector::from(Arc::clone(&self.tls)) };
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_timer(hyper_util::rt::TokioTimer::new())
            .build(dial);
        Ok(HttpClient::new(Hyper { client, last: self.last.clone() }))
    }
}

#[derive(Debug)]
struct Hyper {
    client: Client<Dial, HttpRequestBody>,
    last: LastAnswer,
}

#[async_trait]
impl HttpService for Hyper {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        // ends: the time of the request (`patience`), with which this is dropped
        let answer = self.client.request(request).await.map_err(|error| {
            let kind = if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Request };
            HttpError::new(kind, error)
        })?;
        self.last.note(answer.headers());
        if !answer.status().is_success() {
            return Err(HttpError::new(HttpErrorKind::Unknown, Refusal::of(answer).await));
        }
        let broken = |error: hyper::Error| HttpError::new(HttpErrorKind::Interrupted, error);
        Ok(answer.map(|body| HttpResponseBody::new(MapError { body, broken })))
    }
}

/// A body whose errors are `object_store`'s.
struct MapError<F> {
    body: Incoming,
    broken: F,
}

impl<F: Fn(hyper::Error) -> HttpError + Unpin> Body for MapError<F> {
    type Data = bytes::Bytes;
    type Error = HttpError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<bytes::Bytes>, HttpError>>> {
        let own = self.get_mut();
        Pin::new(&mut own.body).poll_frame(context).map_err(&own.broken)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

/// Makes connections, with TLS where the address asks for it.
#[derive(Clone)]
struct Dial {
    tcp: Tcp,
    tls: TlsConnector,
}

impl std::fmt::Debug for Dial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Dial")
    }
}

impl Service<Uri> for Dial {
    type Response = Line;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Line>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.tcp.poll_ready(context).map_err(io::Error::other)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (connecting, tls) = (self.tcp.call(uri.clone()), self.tls.clone());
        Box::pin(async move {
            // ends: the time of the request that wants the connection (`patience`)
            let plain = connecting.await.map_err(io::Error::other)?;
            if uri.scheme_str() != Some("https") {
                return Ok(Line::Plain(plain));
            }
            let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            let name = ServerName::try_from(host).map_err(io::Error::other)?;
            // ends: the time of the request that wants the connection (`patience`)
            let secured = tls.connect(name, plain.into_inner()).await?;
            Ok(Line::Tls(Box::new(TokioIo::new(secured))))
        })
    }
}

/// A connection.
enum Line {
    Plain(TokioIo<TcpStream>),
    Tls(Box<TokioIo<TlsStream<TcpStream>>>),
}

impl Connection for Line {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for Line {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(line) => Pin::new(line).poll_read(context, buffer),
            Self::Tls(line) => Pin::new(line).poll_read(context, buffer),
        }
    }
}

impl Write for Line {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(line) => Pin::new(line).poll_write(context, bytes),
            Self::Tls(line) => Pin::new(line).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(line) => Pin::new(line).poll_flush(context),
            Self::Tls(line) => Pin::new(line).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(line) => Pin::new(line).poll_shutdown(context),
            Self::Tls(line) => Pin::new(line).poll_shutdown(context),
        }
    }
}
