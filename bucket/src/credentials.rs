//! Credentials: of the environment, or of the files that other S3 programs use.
//!
//! Environment variables stay what they were at the start. The credentials file is read again while it is in use, so that keys which
//! are replaced there, or sessions that are renewed, need no restart. A profile's keys are used, and nothing that it refers to.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use object_store::aws::{AmazonS3Builder, AwsCredential, AwsCredentialProvider};
use object_store::{CredentialProvider, Error};

use crate::BadAddress;
use crate::causes::{cause, why};
use crate::http::Refusal;

/// The longest file that is read.
const FILE_BYTES: u64 = 1 << 20;
/// How old what was read may be.
const READ_AGAIN: Duration = Duration::from_secs(1);

/// There are no credentials for a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NoCredentials {
    /// What gives them was reached, and said no.
    pub(crate) is_refused: bool,
    pub(crate) why: String,
}

impl fmt::Display for NoCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no credentials could be obtained: {}", self.why)
    }
}

impl std::error::Error for NoCredentials {}

impl From<NoCredentials> for Error {
    fn from(missing: NoCredentials) -> Self {
        Self::Generic { store: "S3", source: Box::new(missing) }
    }
}

/// Credentials of another source, whose failures are told from the bucket's.
#[derive(Debug)]
pub(crate) struct Told(pub(crate) AwsCredentialProvider);

#[async_trait]
impl CredentialProvider for Told {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        self.0.get_credential().await.map_err(|error| {
            if cause::<NoCredentials>(&error).is_some() {
                return error;
            }
            let is_refused = cause::<Refusal>(&error).is_some();
            NoCredentials { is_refused, why: why(&error) }.into()
        })
    }
}

/// Keys of a profile in a credentials file, read again each second that they are used in.
pub struct KeysFile {
    file: PathBuf,
    profile: String,
    known: Mutex<(Arc<AwsCredential>, Instant)>,
    read_again: Duration,
}

impl fmt::Debug for KeysFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeysFile")
            .field("file", &self.file)
            .field("profile", &self.profile)
            .finish_non_exhaustive()
    }
}

impl KeysFile {
    /// The keys of this profile, if the file is there and has the profile with keys.
    pub fn open(file: &Path, profile: &str) -> Result<Self, BadAddress> {
        let known = Mutex::new((Arc::new(keys(file, profile)?), Instant::now()));
        Ok(Self { file: file.to_owned(), profile: profile.to_owned(), known, read_again: READ_AGAIN })
    }

    /// The same, of which what was read may be as old as this, and not a second.
    pub fn read_again_after(self, read_again: Duration) -> Self {
        Self { read_again, ..self }
    }

    fn lock(&self) -> MutexGuard<'_, (Arc<AwsCredential>, Instant)> {
        // Each change is whole.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known, and whether it is to be read again, by this caller alone.
    fn known(&self) -> (Arc<AwsCredential>, bool) {
        let mut known = self.lock();
        let is_old = known.1.elapsed() >= self.read_again;
        if is_old {
            known.1 = Instant::now();
        }
        (Arc::clone(&known.0), is_old)
    }
}

#[async_trait]
impl CredentialProvider for KeysFile {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let (known, is_old) = self.known();
        if !is_old {
            return Ok(known);
        }
        let (file, profile) = (self.file.clone(), self.profile.clone());
        // ends: the time of the request that wants the keys (`patience`)
        let read = tokio::task::spawn_blocking(move || keys(&file, &profile)).await;
        // A file that is being replaced may be gone, or half of it: what was known is used until it is whole again.
        let Ok(Ok(read)) = read else { return Ok(known) };
        let read = Arc::new(read);
        self.lock().0 = Arc::clone(&read);
        Ok(read)
    }
}

/// Adds what the files say where the environment says nothing: a region, and keys.
pub(crate) fn from_files(
    builder: AmazonS3Builder,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<AmazonS3Builder, BadAddress> {
    let home = variable("HOME").map(PathBuf::from);
    let place = |name: &str, own: &str| {
        let named = variable(name).map(PathBuf::from);
        named.or_else(|| home.as_ref().map(|home| home.join(".aws").join(own)))
    };
    let profile = variable("AWS_PROFILE").unwrap_or_else(|| "default".to_owned());
    let mut builder = builder;
    if variable("AWS_REGION").or_else(|| variable("AWS_DEFAULT_REGION")).is_none() {
        let file = place("AWS_CONFIG_FILE", "config").and_then(|file| read(&file).ok());
        let section = if profile == "default" { profile.clone() } else { format!("profile {profile}") };
        if let Some(region) = file.as_deref().and_then(|text| value(text, &section, "region")) {
            builder = builder.with_region(region);
        }
    }
    let has = |name: &str| variable(name).is_some();
    let has_keys = has("AWS_ACCESS_KEY_ID") && has("AWS_SECRET_ACCESS_KEY");
    if has_keys || has("AWS_WEB_IDENTITY_TOKEN_FILE") && has("AWS_ROLE_ARN") {
        return Ok(builder);
    }
    let is_asked_for = has("AWS_PROFILE") || has("AWS_SHARED_CREDENTIALS_FILE");
    match place("AWS_SHARED_CREDENTIALS_FILE", "credentials").map(|file| KeysFile::open(&file, &profile)) {
        Some(Ok(keys)) => Ok(builder.with_credentials(Arc::new(keys))),
        // What else there is (a container's, an instance's) is asked by object_store.
        Some(Err(_)) | None if !is_asked_for => Ok(builder),
        Some(Err(error)) => Err(error),
        None => {
            Err(BadAddress("AWS_PROFILE is set, but HOME is not: set AWS_SHARED_CREDENTIALS_FILE".to_owned()))
        }
    }
}

fn read(file: &Path) -> Result<String, BadAddress> {
    let mut text = String::new();
    let read = std::fs::File::open(file).and_then(|file| file.take(FILE_BYTES).read_to_string(&mut text));
    read.map_err(|error| BadAddress(format!("{}: {error}", file.display())))?;
    Ok(text)
}

fn keys(file: &Path, profile: &str) -> Result<AwsCredential, BadAddress> {
    let text = read(file)?;
    let own = |name: &str| value(&text, profile, name).map(str::to_owned);
    let (Some(key_id), Some(secret_key)) = (own("aws_access_key_id"), own("aws_secret_access_key")) else {
        return Err(BadAddress(format!(
            "the profile [{profile}] in {} must have both aws_access_key_id and \
            aws_secret_access_key: profiles that refer to other profiles are not supported",
            file.display()
        )));
    };
    Ok(AwsCredential { key_id, secret_key, token: own("aws_session_token") })
}

/// A value of a section.
fn value<'a>(text: &'a str, section: &str, name: &str) -> Option<&'a str> {
    let (mut is_in, mut found) = (false, None);
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(header) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            is_in = header.0.trim() == section;
        } else if let Some((own, value)) = line.split_once('=').filter(|_| is_in)
            && own.trim() == name
            && !value.trim().is_empty()
        {
            // The last one counts, as it does for other programs.
            found = Some(value.trim());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# keys\n[default]\naws_access_key_id = A\naws_secret_access_key=s/+=\n\n[ other ]\r\n\
        aws_access_key_id=B\r\naws_secret_access_key = t\r\naws_session_token = u\r\n[empty]\naws_access_key_id =\n";

    #[test]
    fn a_profile_has_its_own_values() {
        assert_eq!(value(FILE, "default", "aws_access_key_id"), Some("A"));
        assert_eq!(value(FILE, "default", "aws_secret_access_key"), Some("s/+="));
        assert_eq!(value(FILE, "default", "aws_session_token"), None);
        assert_eq!(value(FILE, "other", "aws_session_token"), Some("u"));
        assert_eq!(value(FILE, "empty", "aws_access_key_id"), None);
        assert_eq!(value(FILE, "no such", "aws_access_key_id"), None);
    }

    fn of(variables: &[(&str, &str)]) -> Result<AmazonS3Builder, BadAddress> {
        let variable =
            |name: &str| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned());
        from_files(AmazonS3Builder::new(), &variable)
    }

    fn has_keys(builder: &AmazonS3Builder) -> bool {
        format!("{builder:?}").contains("KeysFile")
    }

    #[test]
    fn files_are_read_where_the_environment_has_no_keys_and_an_asked_for_profile_must_be_there() {
        let home = std::env::temp_dir().join(format!("kvarts-keys-{}", std::process::id()));
        std::fs::create_dir_all(home.join(".aws")).unwrap();
        std::fs::write(home.join(".aws/credentials"), FILE).unwrap();
        std::fs::write(home.join(".aws/config"), "[profile other]\nregion = eu-north-1\n").unwrap();
        let at = home.display().to_string();
        let home_is = ("HOME", at.as_str());
        assert!(has_keys(&of(&[home_is]).unwrap()));
        let other = of(&[home_is, ("AWS_PROFILE", "other")]).unwrap();
        assert!(has_keys(&other) && format!("{other:?}").contains("eu-north-1"));
        let own = [home_is, ("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "y")];
        assert!(!has_keys(&of(&own).unwrap()));
        assert!(!has_keys(&of(&[]).unwrap()));
        assert!(!has_keys(&of(&[("HOME", "/nowhere")]).unwrap()));
        for (variables, says) in [
            ([home_is, ("AWS_PROFILE", "empty")], "[empty]"),
            ([home_is, ("AWS_PROFILE", "absent")], "[absent]"),
            ([home_is, ("AWS_SHARED_CREDENTIALS_FILE", "/nowhere/keys")], "/nowhere/keys"),
        ] {
            let error = of(&variables).unwrap_err().to_string();
            assert!(error.contains(says) && !error.contains("s/+="), "{error}");
        }
        std::fs::remove_dir_all(&home).unwrap();
    }
}
