//! Local ports that the stack chooses: the first of the candidates that the directory has free.

use super::directory::{Directory, Protocol, StackId};
use crate::wire::Flow;
use std::net::{IpAddr, SocketAddr};

#[derive(Default)]
pub(crate) struct Ports(crate::Ports);

impl Ports {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Claims a flow to `remote` for a stack, with a port that no listener has. `None` if all are taken.
    pub(crate) fn claim(
        &self,
        directory: &Directory,
        local: IpAddr,
        remote: SocketAddr,
        stack: StackId,
    ) -> Option<Flow> {
        self.0.candidates(local, remote).find_map(|port| {
            let flow = Flow { local: SocketAddr::new(local, port), remote };
            (!directory.is_bound(Protocol::Tcp, port) && directory.claim(flow, stack)).then_some(flow)
        })
    }

    /// Binds a socket for datagrams to a port that none has. `None` if all are taken.
    pub(crate) fn bind(&self, directory: &Directory, local: IpAddr, stack: StackId) -> Option<SocketAddr> {
        // All datagrams that the socket sends come from this port: there is one destination to hide from.
        let anywhere = SocketAddr::new(local, 0);
        self.0.candidates(local, anywhere).map(|port| SocketAddr::new(local, port)).find(|&local| {
            !directory.is_bound(Protocol::Udp, local.port()) && directory.bind(Protocol::Udp, local, stack)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    #[test]
    fn ports_are_not_well_known_not_bound_and_not_taken() {
        let (directory, ports) = (Directory::new(), Ports::new());
        let remote = SocketAddr::from(([10, 0, 0, 2], 80));
        assert!(directory.bind(Protocol::Tcp, SocketAddr::new(HERE, 5000), 0));
        let mut seen = HashSet::new();
        while let Some(flow) = ports.claim(&directory, HERE, remote, 0) {
            assert!(flow.local.port() >= 1024 && flow.local.port() != 5000);
            assert!(seen.insert(flow.local.port()), "a port is claimed once");
        }
        assert_eq!(seen.len(), 65536 - 1024 - 1);
        let other = SocketAddr::from(([10, 0, 0, 3], 80));
        assert!(ports.claim(&directory, HERE, other, 0).is_some(), "another destination has its own ports");
    }
}
