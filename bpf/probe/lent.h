/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Maps of probe.c that the agent lends to a controller, whose steer.c reads in them whether a path is silent. */
#ifndef SWERVE_PROBE_LENT_H
#define SWERVE_PROBE_LENT_H

#include "lib/bcc.h"
#include "swerve.h"

BPF_F_TABLE("array", u32, struct swerve_probe_settings, probe_settings, 1, MAPPABLE);
BPF_F_TABLE("array", u32, struct swerve_probe_path, probe_paths, SWERVE_PROBE_PATHS, MAPPABLE);

#endif /* SWERVE_PROBE_LENT_H */
