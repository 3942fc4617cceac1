//! Configures the SDK's client: own connections, own retries, and credentials found as AWS's tools
//! find them.

use std::fmt;
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Duration;

use aws_config::profile::ProfileFileCredentialsProvider;
use aws_config::provider_config::ProviderConfig;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    RequestChecksumCalculation, ResponseChecksumValidation, StalledStreamProtectionConfig,
};
use aws_smithy_http_client::Connector;
use aws_smithy_http_client::proxy::ProxyConfig;
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore};
use aws_smithy_runtime_api::client::dns::{DnsFuture, ResolveDns, ResolveDnsError};
use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnectorSettings, SharedHttpConnector,
};
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;

use super::location::{self, S3Options};
use crate::base::rng::Rng;
use crate::{Error, Result};

/// Connect timeout: a server that takes longer is down.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Half of what servers usually keep an idle connection for, so that servers rarely close first.
const IDLE_MAX: Duration = Duration::from_secs(20);

/// A connection idle this long is never reused: that of a hedge is always new.
const IDLE_NONE: Duration = Duration::from_millis(1);

/// Two clients for one bucket: every connection of the second is a new one.
pub(crate) struct Clients {
    /// How often the keys were read again before these clients were made.
    pub(crate) generation: u64,
    pub(crate) usual: Client,
    pub(crate) fresh: Client,
    /// Its name in messages.
    pub(crate) endpoint: Option<String>,
}

impl Clients {
    /// Reads the environment and the profiles. Credentials are loaded with the first request. The
    /// SDK renews those that have a time of expiry, and keeps others, such as keys in a file: new
    /// clients read them again.
    pub(crate) async fn new(options: &S3Options, generation: u64) -> Result<Self> {
        let endpoint = options.endpoint.clone().or_else(endpoint_of_environment);
        let ca =
            options.ca.clone().or_else(|| std::env::var_os("AWS_CA_BUNDLE").map(PathBuf::from));
        let plain = endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://"));
        let trust = trust(ca, plain)?;
        let connections = Connections::new(&trust, ProxyConfig::from_env(), IDLE_MAX)?;
        let loaded = load(options, endpoint.is_some(), connections).await;
        let endpoint = endpoint.or_else(|| loaded.endpoint_url().map(str::to_owned));
        // It appears in messages, so one from the environment or a profile must not contain a
        // secret either.
        if let Some(Err(reason)) = endpoint.as_deref().map(location::endpoint) {
            return Err(Error::BadUrl { url: "endpoint_url".to_owned(), reason });
        }
        let client = |idle| {
            let connections = Connections::new(&trust, proxy(endpoint.as_deref()), idle)?;
            Ok(client(options, &loaded, endpoint.as_deref(), connections))
        };
        let (usual, fresh) = (client(IDLE_MAX)?, client(IDLE_NONE)?);
        Ok(Clients { generation, usual, fresh, endpoint })
    }
}

fn endpoint_of_environment() -> Option<String> {
    let of = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    of("AWS_ENDPOINT_URL_S3").or_else(|| of("AWS_ENDPOINT_URL"))
}

async fn load(options: &S3Options, has_endpoint: bool, connections: Connections) -> SdkConfig {
    let defaults = aws_config::defaults(BehaviorVersion::latest());
    let mut loader = defaults.http_client(connections.clone());
    if let Some(region) = options.region.clone().or_else(|| has_endpoint.then(region_of_own)) {
        loader = loader.region(Region::new(region));
    }
    if let Some(profile) = &options.profile {
        loader = loader.profile_name(profile);
    }
    if options.credentials.is_some() || options.profile.is_some() {
        loader = loader.credentials_provider(provider(options, connections));
    }
    loader.load().await
}

/// With a custom endpoint any region works; querying the cloud for it would take seconds.
fn region_of_own() -> String {
    let of = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let named = of("AWS_REGION").or_else(|| of("AWS_DEFAULT_REGION"));
    named.unwrap_or_else(|| "us-east-1".to_owned())
}

/// A credentials file in the URL has priority over keys in the environment.
#[expect(deprecated, reason = "the names that replace them are in a crate of internals")]
fn provider(options: &S3Options, connections: Connections) -> ProfileFileCredentialsProvider {
    use aws_config::profile::profile_file::{ProfileFileKind, ProfileFiles};
    let config = ProviderConfig::without_region().with_http_client(connections);
    let mut provider = ProfileFileCredentialsProvider::builder().configure(&config);
    if let Some(file) = &options.credentials {
        let files = ProfileFiles::builder().with_file(ProfileFileKind::Credentials, file);
        provider = provider.profile_files(files.build());
    }
    if let Some(profile) = &options.profile {
        provider = provider.profile_name(profile);
    }
    provider.build()
}

fn client(
    options: &S3Options,
    loaded: &SdkConfig,
    endpoint: Option<&str>,
    connections: Connections,
) -> Client {
    let mut config = aws_sdk_s3::config::Builder::from(loaded)
        .http_client(connections)
        // This crate's retries cover bodies, deadlines, and each other.
        .retry_config(RetryConfig::disabled())
        .timeout_config(TimeoutConfig::disabled())
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled());
    if loaded.region().is_none() {
        config = config.region(Region::new("us-east-1"));
    }
    if let Some(endpoint) = endpoint {
        // Servers other than AWS's refuse or misread the checksums that the SDK sends by default.
        config = config
            .endpoint_url(endpoint)
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
    }
    let path_style = options.path_style.unwrap_or(endpoint.is_some());
    Client::from_conf(config.force_path_style(path_style).build())
}

/// The trusted certificates: the file's authorities and no others, or the machine's.
fn trust(ca: Option<PathBuf>, plain: bool) -> Result<TrustStore> {
    let Some(path) = ca else {
        let machine = TrustStore::default();
        return Ok(if plain { TrustStore::empty() } else { machine });
    };
    let name = path.display().to_string();
    let pem = std::fs::read(&path).map_err(|e| Error::from_io("read", name.clone(), e))?;
    Ok(TrustStore::empty().with_pem_certificate(pem))
}

/// The proxy of the environment, but none for an endpoint on this machine.
fn proxy(endpoint: Option<&str>) -> ProxyConfig {
    let is_here = endpoint.is_some_and(is_loopback);
    if is_here { ProxyConfig::disabled() } else { ProxyConfig::from_env() }
}

/// Whether the host of an endpoint is `localhost` or a loopback address.
fn is_loopback(endpoint: &str) -> bool {
    let authority = endpoint.split("://").nth(1).and_then(|rest| rest.split('/').next());
    let authority = authority.unwrap_or("");
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next(),
        None => authority.split(':').next(),
    };
    let host = host.unwrap_or("");
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Connections of HTTP/1.1, kept while they are used.
#[derive(Clone, Debug)]
struct Connections(SharedHttpConnector);

impl Connections {
    fn new(trust: &TrustStore, proxy: ProxyConfig, idle: Duration) -> Result<Self> {
        let settings = HttpConnectorSettings::builder().connect_timeout(CONNECT_MAX).build();
        let build = || {
            let tls = TlsContext::builder().with_trust_store(trust.clone()).build().ok()?;
            let connector = Connector::builder()
                .connector_settings(settings)
                .pool_idle_timeout(idle)
                .proxy_config(proxy)
                .tls_provider(Provider::Rustls(CryptoMode::Ring))
                .tls_context(tls)
                .build_with_resolver(Shuffled);
            Some(Connections(SharedHttpConnector::new(connector)))
        };
        // The library asserts that certificates are certificates.
        catch_unwind(AssertUnwindSafe(build)).ok().flatten().ok_or_else(|| Error::BadUrl {
            url: "s3:".to_owned(),
            reason: "expected a file with certificates in ca= or AWS_CA_BUNDLE".to_owned(),
        })
    }
}

impl HttpClient for Connections {
    fn http_connector(
        &self,
        _settings: &HttpConnectorSettings,
        _components: &RuntimeComponents,
    ) -> SharedHttpConnector {
        self.0.clone()
    }
}

/// Resolves names, and shuffles the addresses: a store has many front ends behind one name, and the
/// first one would get all connections.
#[derive(Clone, Debug)]
struct Shuffled;

impl ResolveDns for Shuffled {
    fn resolve_dns<'a>(&'a self, name: &'a str) -> DnsFuture<'a> {
        DnsFuture::new(async move {
            let unknown = |e: String| ResolveDnsError::new(NameUnknown(format!("{name}: {e}")));
            let found = tokio::net::lookup_host((name, 0)).await;
            let found = found.map_err(|e| unknown(e.to_string()))?;
            let mut addresses: Vec<IpAddr> = found.map(|address| address.ip()).collect();
            let mut rng = Rng::from_entropy();
            for i in (1..addresses.len()).rev() {
                addresses.swap(i, rng.below(i as u64 + 1) as usize); // fits: an index
            }
            if addresses.is_empty() { Err(unknown("no address".to_owned())) } else { Ok(addresses) }
        })
    }
}

/// A name for which there is no address.
#[derive(Debug)]
pub(crate) struct NameUnknown(String);

impl fmt::Display for NameUnknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot resolve {}", self.0)
    }
}

impl std::error::Error for NameUnknown {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_endpoints_bypass_the_proxy() {
        for here in [
            "http://127.0.0.1:9000",
            "http://127.8.9.10/",
            "https://localhost/path",
            "http://localhost:80",
            "http://[::1]:9000/",
        ] {
            assert!(is_loopback(here), "{here}");
        }
        for elsewhere in [
            "http://10.0.0.1:9000",
            "http://localhost.example",
            "http://rgw/127.0.0.1",
            "http://[2001:db8::1]:9000",
            "127.0.0.1",
            "",
        ] {
            assert!(!is_loopback(elsewhere), "{elsewhere}");
        }
    }
}
