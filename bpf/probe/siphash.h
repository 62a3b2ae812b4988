/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * SipHash-2-4 (Aumasson and Bernstein, 2012). The loop stays one: unrolled at each place that hashes it is half of all
 * the time that probe.c takes to compile.
 */
#ifndef SWERVE_PROBE_SIPHASH_H
#define SWERVE_PROBE_SIPHASH_H

#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define SIP_LITTLE(word) __builtin_bswap64(word)
#else
#define SIP_LITTLE(word) (word)
#endif

struct siphash {
	u64 v0;
	u64 v1;
	u64 v2;
	u64 v3;
};

static __always_inline u64 sip_rotated(u64 word, u32 bits)
{
	return word << bits | word >> (64 - bits);
}

static __always_inline void sip_round(struct siphash *hash)
{
	hash->v0 += hash->v1;
	hash->v1 = sip_rotated(hash->v1, 13) ^ hash->v0;
	hash->v0 = sip_rotated(hash->v0, 32);
	hash->v2 += hash->v3;
	hash->v3 = sip_rotated(hash->v3, 16) ^ hash->v2;
	hash->v0 += hash->v3;
	hash->v3 = sip_rotated(hash->v3, 21) ^ hash->v0;
	hash->v2 += hash->v1;
	hash->v1 = sip_rotated(hash->v1, 17) ^ hash->v2;
	hash->v2 = sip_rotated(hash->v2, 32);
}

static __always_inline void sip_word(struct siphash *hash, u64 word)
{
	hash->v3 ^= word;
	sip_round(hash);
	sip_round(hash);
	hash->v0 ^= word;
}

/*
 * `key`: its two halves, each read as a little-endian number. `words`: known when it is compiled, of eight bytes each.
 */
static __always_inline u64 siphash(const u64 *key, const u64 *said, u32 words)
{
	struct siphash hash = {
		.v0 = key[0] ^ 0x736f6d6570736575ULL,
		.v1 = key[1] ^ 0x646f72616e646f6dULL,
		.v2 = key[0] ^ 0x6c7967656e657261ULL,
		.v3 = key[1] ^ 0x7465646279746573ULL,
	};

#pragma clang loop unroll(disable)
	for (u32 i = 0; i < words; i++)
		sip_word(&hash, SIP_LITTLE(said[i]));
	sip_word(&hash, (u64)(words * 8 & 0xff) << 56);
	hash.v2 ^= 0xff;
	sip_round(&hash);
	sip_round(&hash);
	sip_round(&hash);
	sip_round(&hash);
	return hash.v0 ^ hash.v1 ^ hash.v2 ^ hash.v3;
}

#endif /* SWERVE_PROBE_SIPHASH_H */
