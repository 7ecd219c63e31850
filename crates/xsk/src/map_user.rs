//! Which interface's program uses a map of sockets.

use crate::info::InterfaceInfo;
use crate::netlink::Interface;
use crate::program::{AttachError, Program};

/// The name of libxdp's program that calls others, of which each has its own maps.
const DISPATCHER: &str = "xdp_dispatcher";

impl Program {
    /// Checks whether the map's program can be on the interface with this index: the kernel drops
    /// each frame that a program redirects to a socket of another interface. For a map that
    /// another program owns ([`map`](Self::map), [`pinned_map`](Self::pinned_map)).
    ///
    /// It is an error if a program on another interface of this network namespace uses the map, and
    /// none on this one does. No error is reported if that cannot be known: if this process may not
    /// look up programs (`CAP_SYS_ADMIN`), or if libxdp's dispatcher is on the interface, whose
    /// programs the kernel does not list. Some system calls for each interface of the namespace.
    ///
    /// # Errors
    ///
    /// [`AttachError::OtherInterface`].
    pub fn check_interface(&self, ifindex: u32) -> Result<(), AttachError> {
        let Ok(interface) = Interface::by_index(ifindex) else { return Ok(()) };
        let may_use = |program: u32| {
            self.is_used_by(program) != Some(false) || Self::name_of(program).as_deref() == Some(DISPATCHER)
        };
        if interface.programs.iter().any(|attached| may_use(attached.program)) {
            return Ok(());
        }
        for other in InterfaceInfo::all() {
            let user = other.programs.iter().find(|attached| self.is_used_by(attached.program) == Some(true));
            if let Some(user) = user {
                let program = user.program;
                return Err(AttachError::OtherInterface { interface: interface.name, other: other.name, program });
            }
        }
        Ok(())
    }
}
