//! Issues the cluster's certificates: an authority, and a key pair for each subject.

use std::collections::BTreeMap;
use std::net::IpAddr;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, SanType,
};

use super::components::node_name;
use crate::node::{MAX_NODES, SERVICE_ADDRESS, address};

/// PEM files by name: `ca.crt`, and `<subject>.crt` with `<subject>.key` for each subject.
pub(super) type PemFiles = BTreeMap<String, String>;

/// The file name, user and group of each certificate. Kubernetes takes user and group from the
/// certificate's subject (kubernetes.io, "PKI certificates and requirements").
const SUBJECTS: &[(&str, &str, &str)] = &[
    ("apiserver", "kube-apiserver", ""),
    (
        "apiserver-kubelet-client",
        "kube-apiserver-kubelet-client",
        "system:masters",
    ),
    ("admin", "admin", "system:masters"),
    ("controller-manager", "system:kube-controller-manager", ""),
    ("scheduler", "system:kube-scheduler", ""),
];

/// Issues every certificate and key, and the key that signs the tokens of service accounts
/// (`service-account.key`, `.pub`).
///
/// # Errors
/// When the cryptography library fails.
pub(super) fn issue() -> Result<PemFiles, rcgen::Error> {
    let mut files = PemFiles::new();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::DigitalSignature,
        KeyUsagePurpose::CrlSign,
    ];
    params
        .distinguished_name
        .push(DnType::CommonName, "bursar-e2e");
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    files.insert("ca.crt".to_owned(), authority.pem());

    let kubelets = (1..=MAX_NODES).map(|number| {
        let user = format!("system:node:{}", node_name(number));
        (kubelet(number), user, "system:nodes")
    });
    let parties = SUBJECTS
        .iter()
        .map(|(party, user, group)| ((*party).to_owned(), (*user).to_owned(), *group));
    for (party, user, group) in parties.chain(kubelets) {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, user);
        if !group.is_empty() {
            params
                .distinguished_name
                .push(DnType::OrganizationName, group);
        }
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
        ];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ClientAuth,
            ExtendedKeyUsagePurpose::ServerAuth,
        ];
        params.subject_alt_names = subject_alt_names()?;
        let key = KeyPair::generate()?;
        files.insert(
            format!("{party}.crt"),
            params.signed_by(&key, &authority)?.pem(),
        );
        files.insert(format!("{party}.key"), key.serialize_pem());
    }
    let signer = KeyPair::generate()?;
    files.insert("service-account.key".to_owned(), signer.serialize_pem());
    files.insert("service-account.pub".to_owned(), signer.public_key_pem());
    Ok(files)
}

/// Returns the name of the kubelet's certificate on the node with this number.
pub(super) fn kubelet(number: u8) -> String {
    format!("kubelet-{number}")
}

fn subject_alt_names() -> Result<Vec<SanType>, rcgen::Error> {
    let hosts = [
        "localhost",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
    ];
    let nodes = 1..=MAX_NODES;
    let addresses = [IpAddr::from([127, 0, 0, 1]), IpAddr::V4(SERVICE_ADDRESS)]
        .into_iter()
        .chain(nodes.clone().map(|number| IpAddr::V4(address(number))));
    let mut names: Vec<SanType> = addresses.map(SanType::IpAddress).collect();
    let hosts = hosts.into_iter().map(str::to_owned);
    for host in hosts.chain(nodes.map(node_name)) {
        names.push(SanType::DnsName(host.try_into()?));
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn issue_returns_a_certificate_and_key_per_subject() {
        let files = issue().unwrap();
        for (party, ..) in SUBJECTS {
            assert!(files[&format!("{party}.crt")].starts_with("-----BEGIN CERTIFICATE"));
            assert!(files[&format!("{party}.key")].contains("PRIVATE KEY"));
        }
        for number in 1..=MAX_NODES {
            assert!(files.contains_key(&format!("{}.key", kubelet(number))));
        }
    }
}
