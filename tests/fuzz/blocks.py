"""What random models are made of: blocks as source text, from (B, T, C) to (B, T, C).

A block reads ``x``, ``tokens``, ``mask`` and ``kept`` (a list of earlier streams), and leaves a new ``x``.
Names in braces are filled in by ``source.py``: sizes, and a draw from ``PICKS`` for each occurrence.
"""

# ruff: noqa: E501

from __future__ import annotations

Block = tuple[str, str]
"""Lines of ``__init__`` and lines of ``forward``, without indentation."""

PICKS: dict[str, tuple[str, ...]] = {
    "act": (
        "F.relu", "F.gelu", "torch.tanh", "F.silu", "torch.sigmoid", "F.elu", "F.leaky_relu", "F.softplus", "F.mish",
        "F.hardswish", "torch.sin", "F.selu", "F.relu6", "torch.square", "torch.abs", "F.logsigmoid", "F.hardtanh",
        "F.celu", "F.softsign", "torch.erf",
    ),
    "act_": ("F.relu_", "torch.tanh_", "torch.sigmoid_", "F.leaky_relu_", "F.elu_", "F.hardtanh_", "torch.sin_"),
    "p": ("0.1", "0.5"),
    "times": ("1", "2", "4", "8"),
    "causal": ("True", "False"),
    "norm": (
        "nn.LayerNorm({C})", "nn.RMSNorm({C})", "nn.Identity()", "nn.LayerNorm({C}, elementwise_affine=False)",
        "nn.LayerNorm({C}, bias=False)", "nn.LayerNorm(({T}, {C}))",
    ),
    "image_norm": (
        "nn.BatchNorm2d({C})", "nn.BatchNorm2d({C}, momentum=0.3, affine=False)",
        "nn.BatchNorm2d({C}, track_running_stats=False)", "nn.GroupNorm(4, {C})",
        "nn.InstanceNorm2d({C}, affine=True)", "nn.InstanceNorm2d({C}, track_running_stats=True)",
        "nn.BatchNorm2d({C}, momentum=None)", "nn.Identity()",
    ),
    "drop": (
        "nn.Dropout({p})", "nn.Dropout(0.0)", "nn.AlphaDropout({p})", "nn.FeatureAlphaDropout({p})",
        "nn.Dropout1d({p})", "nn.Identity()",
    ),
    "bias": ("True", "False"),
    "mix": ("x = x + y", "x = x + 0.5 * y", "x = y", "x = 0.5 * (x + y)", "x = torch.tanh(x) + y", "x = x + y.tanh()"),
    "pad": ("padding=1", "padding=1, padding_mode='circular'", "padding='same'", "padding=2, dilation=2"),
    "groups": ("1", "4", "{C}"),
    "reduce": ("mean", "sum", "amax", "std", "var", "logsumexp"),
}  # fmt: skip

BLOCKS: dict[str, tuple[Block, ...]] = {
    "mlp": (
        ("self.norm{i}, self.up{i}, self.drop{i} = {norm}, nn.Linear({C}, {times} * {C}, bias={bias}), {drop}\n"
         "self.down{i} = nn.Linear(self.up{i}.out_features, {C})",
         "y = self.down{i}(self.drop{i}({act}(self.up{i}(self.norm{i}(x)))))\n{mix}"),
        ("self.gate{i}, self.up{i} = nn.Linear({C}, 2 * {C}, bias=False), nn.Linear({C}, 2 * {C}, bias=False)\n"
         "self.down{i} = nn.Linear(2 * {C}, {C}, bias=False)",
         "y = self.down{i}({act}(self.gate{i}(x)) * self.up{i}(x))\n{mix}"),
        ("self.a{i} = nn.Parameter(torch.randn({C}, {C}) / {C})\nself.b{i} = nn.Parameter(torch.randn({C}))",
         "y = {act}(x @ self.a{i}.t() + self.b{i})\ny = y @ self.a{i}\n{mix}"),
        ("self.up{i} = nn.Linear({C}, 2 * {C})", "y = F.glu(self.up{i}(x), dim=-1)\n{mix}"),
        ("self.w{i} = nn.Parameter(torch.randn({B}, {C}, {C}) / {C})",
         "y = torch.baddbmm(x, x, self.w{i}, beta=0.5)\n{mix}"),
        ("self.a{i} = nn.Parameter(torch.randn({C}, 3) / 4)",
         "y = torch.einsum('btc,cr,dr->btd', x, self.a{i}, self.a{i})\n{mix}"),
        ("self.pair{i} = nn.Bilinear({C}, {C}, {C})",
         "y = self.pair{i}(x[:, :4], x[:, :4]).mean(1, keepdim=True)\n{mix}"),
    ),
    "attention": (
        ("self.qkv{i}, self.out{i} = nn.Linear({C}, 3 * {C}, bias={bias}), nn.Linear({C}, {C})",
         "q, k, v = self.qkv{i}(x).view({B}, {T}, 3, 4, {D}).permute(2, 0, 3, 1, 4)\n"
         "y = F.scaled_dot_product_attention(q, k, v, is_causal={causal})\n"
         "y = self.out{i}(y.transpose(1, 2).reshape({B}, {T}, {C}))\n{mix}"),
        ("self.qkv{i} = nn.Linear({C}, 3 * {C})",
         "q, k, v = (t.view({B}, {T}, 4, {D}).transpose(1, 2) for t in self.qkv{i}(x).chunk(3, -1))\n"
         "y = F.scaled_dot_product_attention(q, k, v, is_causal={causal}, dropout_p={p} if self.training else 0.0)\n"
         "y = y.transpose(1, 2).flatten(2)\n{mix}"),
        ("self.q{i}, self.kv{i} = nn.Linear({C}, {C}), nn.Linear({C}, 2 * {C})",
         "q = self.q{i}(x).view({B}, {T}, 4, {D}).transpose(1, 2)\n"
         "k, v = self.kv{i}(kept[{i} % len(kept)]).view({B}, {T}, 2, 4, {D}).permute(2, 0, 3, 1, 4)\n"
         "y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])\n"
         "y = y.transpose(1, 2).reshape(x.shape)\n{mix}"),
        ("self.qkv{i} = nn.Linear({C}, 3 * {C})\nself.bias{i} = nn.Parameter(torch.zeros(4, {T}, {T}))",
         "q, k, v = self.qkv{i}(x).view({B}, {T}, 3, 4, {D}).permute(2, 0, 3, 1, 4)\n"
         "y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias{i}.to(q.dtype), dropout_p={p} if self.training else 0.0)\n"
         "y = y.transpose(1, 2).reshape(x.shape)\n{mix}"),
        ("self.q{i}, self.kv{i} = nn.Linear({C}, {C}), nn.Linear({C}, {C})",
         "q = self.q{i}(x).view({B}, {T}, 4, {D}).transpose(1, 2)\n"
         "k, v = self.kv{i}(x).view({B}, {T}, 2, 2, {D}).permute(2, 0, 3, 1, 4)\n"
         "y = F.scaled_dot_product_attention(q, k, v, is_causal={causal}, enable_gqa=True)\n"
         "y = y.transpose(1, 2).reshape(x.shape)\n{mix}"),
        ("self.qk{i} = nn.Linear({C}, 2 * {C})",
         "q, k = self.qk{i}(x).split({C}, -1)\nscores = (q @ k.transpose(1, 2)) / {C} ** 0.5\n"
         "scores = scores.masked_fill(torch.ones({T}, {T}, dtype=torch.bool).triu(1), float('-inf'))\n"
         "y = F.dropout(scores.softmax(-1), {p}, self.training) @ x\n{mix}"),
        ("self.qk{i} = nn.Linear({C}, 2 * {C})",
         "q, k = self.qk{i}(x).view({B}, {T}, 2, 4, {D}).permute(2, 0, 3, 1, 4)\n"
         "causal = torch.ones({T}, {T}, dtype=torch.bool).tril()[None, None] & mask[:, None, None, :]\n"
         "y = F.scaled_dot_product_attention(q, k, q, attn_mask=causal | torch.eye({T}, dtype=torch.bool))\n"
         "y = y.transpose(1, 2).reshape(x.shape)\n{mix}"),
        ("self.attention{i} = nn.MultiheadAttention({C}, 4, dropout={p}, batch_first=True)",
         "y = self.attention{i}(x, x, x, need_weights=False)[0]\n{mix}"),
    ),
    "convolution": (
        ("self.conv{i}, self.norm{i} = nn.Conv2d({C}, {C}, 3, {pad}, groups={groups}), {image_norm}",
         "image = x.transpose(1, 2).reshape({B}, {C}, {H}, {W})\n"
         "y = F.relu(self.norm{i}(self.conv{i}(image)), inplace=True).flatten(2).transpose(1, 2)\n{mix}"),
        ("self.conv{i}, self.norm{i} = nn.Conv2d({C}, 2 * {C}, 1, bias={bias}), nn.BatchNorm2d(2 * {C})\n"
         "self.fall{i} = nn.Conv2d(2 * {C}, {C}, 3, stride=2, padding=1)",
         "image = x.transpose(1, 2).unflatten(2, ({H}, {W})).contiguous(memory_format=torch.channels_last)\n"
         "image = self.fall{i}({act}(self.norm{i}(self.conv{i}(image))))\n"
         "y = F.interpolate(image, size=({H}, {W}), mode='nearest').flatten(2).transpose(1, 2)\n{mix}"),
        ("self.fall{i} = nn.Conv2d({C}, {C}, 2, stride=2)\nself.rise{i} = nn.ConvTranspose2d({C}, {C}, 2, stride=2)",
         "image = x.transpose(1, 2).reshape({B}, {C}, {H}, {W})\n"
         "y = self.rise{i}(F.max_pool2d(image, 3, 1, 1)[:, :, ::2, ::2]).flatten(2).transpose(1, 2)\n"
         "y = y + self.rise{i}(self.fall{i}(image)).flatten(2).transpose(1, 2)\n{mix}"),
        ("self.conv{i} = nn.Conv1d({C}, {C}, 3, {pad})",
         "y = {act}(self.conv{i}(x.transpose(1, 2))).transpose(1, 2)\n{mix}"),
        ("",
         "image = x.transpose(1, 2).reshape({B}, {C}, {H}, {W})\n"
         "y = F.interpolate(F.avg_pool2d(image, 2), scale_factor=2, mode='bilinear').flatten(2).transpose(1, 2)\n{mix}"),
        ("self.conv{i} = nn.utils.parametrizations.weight_norm(nn.Conv1d({C}, {C}, 1))",
         "y = self.conv{i}(x.transpose(1, 2)).transpose(1, 2)\n{mix}"),
        ("self.squeeze{i} = nn.Conv2d({C}, {C}, 1)",
         "image = x.transpose(1, 2).reshape({B}, {C}, {H}, {W})\n"
         "y = image * torch.sigmoid(self.squeeze{i}(F.adaptive_avg_pool2d(image, 1)))\n"
         "y = y.flatten(2).transpose(1, 2)\n{mix}"),
        ("self.conv{i} = nn.Conv2d({C}, 4 * {C}, 3, padding=1)",
         "image = x.transpose(1, 2).reshape({B}, {C}, {H}, {W})\n"
         "image = F.pixel_shuffle(self.conv{i}(F.avg_pool2d(image, 2)), 2)\n"
         "y = F.dropout2d(image, {p}, self.training).flatten(2).transpose(1, 2)\n{mix}"),
        ("self.conv{i} = nn.Conv3d({C}, {C}, 3, padding=1)",
         "image = x.transpose(1, 2).reshape({B}, {C}, 2, {H} // 2, {W})\n"
         "y = {act}(self.conv{i}(image)).flatten(2).transpose(1, 2)\n{mix}"),
    ),
    "batch norm": (
        ("self.batch{i} = nn.BatchNorm1d({C})", "y = {act}(self.batch{i}(x.reshape(-1, {C}))).view(x.shape)\n{mix}"),
        ("self.batch{i} = nn.BatchNorm1d({C})",
         "y = self.batch{i}({act}(self.batch{i}(x.flatten(0, 1)))).unflatten(0, ({B}, {T}))\n{mix}"),
        ("self.batch{i} = nn.BatchNorm1d({C}).eval()",
         "self.batch{i}.eval()\ny = self.batch{i}(x.transpose(1, 2)).transpose(1, 2)\n{mix}"),
        ("self.batch{i} = nn.BatchNorm1d({C})",
         "y = F.batch_norm(x.flatten(0, 1), None, None, self.batch{i}.weight, training=True).view(x.shape)\n{mix}"),
    ),
    "norm": (
        ("self.norm{i} = {norm}", "x = self.norm{i}(x)"),
        ("", "y = F.normalize(x, dim=-1)\n{mix}"),
        ("", "y = x.softmax(-1) * {C}\n{mix}"),
        ("", "y = x.log_softmax(1)\n{mix}"),
        ("self.norm{i} = nn.GroupNorm(4, {C})", "y = self.norm{i}(x.transpose(1, 2)).transpose(1, 2)\n{mix}"),
        ("", "y = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)\n{mix}"),
    ),
    "views": (
        ("", "x = x.flip(1)"),
        ("", "y = x.transpose(1, 2).reshape({B}, {T}, {C})\n{mix}"),
        ("", "y = torch.cat([t.exp().clamp(max=3.0) for t in x.chunk(4, -1)], -1)\n{mix}"),
        ("", "y = torch.stack(x.unbind(1)[::-1], 1)\n{mix}"),
        ("", "y = x.roll(3, 1).permute(2, 0, 1).contiguous().permute(1, 2, 0)\n{mix}"),
        ("", "y = x.view({B}, {H}, {W}, {C}).transpose(1, 2).reshape({B}, {T}, {C})\n{mix}"),
        ("", "y = F.pad(x, (0, 0, 1, 0))[:, :-1]\n{mix}"),
        ("", "y = x[:, :1].expand({B}, {T}, {C}) * x\n{mix}"),
        ("", "y = x.as_strided(x.shape, x.stride()).sin()\n{mix}"),
        ("", "y = x.unfold(1, 4, 4).sum(-1).repeat_interleave(4, 1)\n{mix}"),
        ("", "y = x.reshape(-1)[torch.arange({B} * {T} * {C}).flip(0)].view(x.shape)\n{mix}"),
        ("", "a, b = x.split([4, {C} - 4], -1)\ny = torch.cat([b.tanh(), a], -1)\n{mix}"),
        ("", "y = x.diagonal(0, 1, 2).mean(-1)[:, None, None] + x\n{mix}"),
        ("", "y = x.repeat(1, 2, 1)[:, ::2]\n{mix}"),
        ("", "y = x.mT.contiguous().mT.reshape({B}, -1).view(x.shape).squeeze().unsqueeze(0)[0]\n{mix}"),
        ("",
         "y = torch.view_as_real(torch.view_as_complex(x.float().reshape({B}, {T}, -1, 2)) * 1j).flatten(2).to(x.dtype)\n"
         "{mix}"),
    ),
    "in place": (
        ("self.up{i} = nn.Linear({C}, {C})",
         "y = self.up{i}(x)\ny[:, :, :4] *= 0.5\ny.add_(1.0)\ny = {act_}(y)\n{mix}"),
        ("", "y = x.clone()\ny[:, ::2] += 1.0\ny[..., 0] = 0.0\n{mix}"),
        ("", "y = x * 1.5\ny.transpose(1, 2)[:, :3].mul_(2.0)\n{mix}"),
        ("", "y = x.tanh()\ny.masked_fill_(~mask[..., None], 0.0)\n{mix}"),
        ("", "y = torch.zeros_like(x)\ny[:, 1:] = x[:, :-1]\n{mix}"),
        ("", "y = torch.zeros_like(x)\ny.index_add_(1, torch.arange({T}) % 4, x)\n{mix}"),
        ("", "y = torch.empty_like(x)\ny.copy_(x.sin())\ny.clamp_(-1.0, 1.0)\n{mix}"),
        ("", "y = x + 0.0\nview = y.view(-1)\nview[:8].zero_()\ny = y.exp().clamp(max=2.0)\n{mix}"),
        ("", "x = x.clone()\nx += kept[{i} % len(kept)]\nx *= 0.5"),
        ("", "y = x.mul(2.0)\ny.scatter_add_(1, tokens[..., None].expand(-1, -1, {C}) % {T}, x)\n{mix}"),
        ("",
         "y = torch.zeros_like(x)\nfor t in range(0, {T}, {T} // 4):\n    y[:, t] = {act}(x[:, t]) + y[:, t - 1]\n"
         "{mix}"),
        ("", "y = F.dropout(x * 1.0, {p}, self.training, inplace=True)\n{mix}"),
        ("", "y = x + 1.0\nz = y.sum(-1, keepdim=True)\ny.div_(z.square() + 1.0)\n{mix}"),
    ),
    "shared": (
        ("", "y = F.linear({act}(F.linear(x, self.shared.weight)), self.shared.weight.t(), self.shared.bias)\n{mix}"),
        ("", "for _ in range(2):\n    y = {act}(self.shared(x))\n    {mix}"),
        ("", "w = self.shared.weight / self.shared.weight.norm()\ny = x @ w.t() + x @ w\n{mix}"),
        ("", "y = x * self.scale + self.scale.sum()\n{mix}"),
        ("",
         "y = x.to(self.table.weight.dtype) @ self.table.weight[:{C}].t()\ny = F.pad(y, (0, {C} - y.shape[-1]))\n{mix}"),
        ("self.tied{i} = nn.Linear({C}, {C})\nself.tied{i}.weight = self.shared.weight",
         "y = {act}(self.tied{i}(x))\n{mix}"),
        ("", "y = self.shared_norm(self.shared_norm(x) + kept[0])\n{mix}"),
    ),
    "branch": (
        ("self.left{i}, self.right{i} = nn.Linear({C}, {C}), nn.Linear({C}, {C})",
         "y = {act}(self.left{i}(x)) + {act}(self.right{i}(x))\n{mix}"),
        ("self.left{i}, self.right{i} = nn.Linear({C}, {C} // 2), nn.Linear({C}, {C} // 2)",
         "y = torch.cat([{act}(self.left{i}(x)), {act}(self.right{i}(x))], -1)\n{mix}"),
        ("self.side{i} = nn.Linear({C}, {C})", "unused = {act}(self.side{i}(x))\ny = {act}(x)\n{mix}"),
        ("", "y = torch.where(x > 0, {act}(x), {act}(-x))\n{mix}"),
        ("", "y = torch.maximum({act}(x), {act}(kept[{i} % len(kept)]))\n{mix}"),
        ("", "kept.append({act}(x))\ny = kept[-1] * kept[{i} % len(kept)].tanh()\n{mix}"),
        ("", "kept.append(x)\nx = torch.lerp(x, kept[{i} % len(kept)], 0.3)"),
        ("self.router{i}, self.experts{i} = nn.Linear({C}, 2), nn.ModuleList(nn.Linear({C}, {C}) for _ in range(2))",
         "weights = self.router{i}(x).softmax(-1)\n"
         "y = sum(weights[..., e, None] * {act}(self.experts{i}[e](x)) for e in range(2))\n{mix}"),
        ("", "y, z = torch.aminmax(x, dim=1, keepdim=True)\ny = x * (y + z)\n{mix}"),
    ),
    "buffer": (
        ("self.register_buffer('average{i}', torch.zeros({C}))",
         "y = {act}(x)\nwith torch.no_grad():\n"
         "    self.average{i}.lerp_(y.mean((0, 1)).to(self.average{i}.dtype), 0.1)\ny = y - self.average{i}\n{mix}"),
        ("self.register_buffer('count{i}', torch.zeros((), dtype=torch.long))", "self.count{i} += 1\nx = x + {act}(x)"),
        ("self.register_buffer('memory{i}', torch.randn(4, {C}))",
         "y = x + self.memory{i}[0]\nwith torch.no_grad():\n"
         "    self.memory{i}.copy_(torch.cat([self.memory{i}[1:], y[0, :1].to(self.memory{i}.dtype)]))\n{mix}"),
        ("self.register_buffer('factor{i}', torch.ones({C}))",
         "y = x * self.factor{i}.clone()\nself.factor{i}.mul_(0.9)\n{mix}"),
        ("self.register_buffer('seen{i}', torch.zeros(32))",
         "self.seen{i}.index_add_(0, tokens.flatten(), torch.ones({B} * {T}, dtype=self.seen{i}.dtype))\n"
         "y = x / (1.0 + self.seen{i}.clone().mean())\n{mix}"),
        ("self.spectral{i} = nn.utils.parametrizations.spectral_norm(nn.Linear({C}, {C}))",
         "y = {act}(self.spectral{i}(x))\n{mix}"),
        ("self.register_buffer('mean{i}', torch.zeros({C}))",
         "self.mean{i} = self.mean{i} * 0.9 + x.detach().mean((0, 1)).to(self.mean{i}.dtype) * 0.1\n"
         "y = {act}(x - self.mean{i})\n{mix}"),
    ),
    "random": (
        ("self.drop{i} = {drop}", "y = self.drop{i}({act}(x))\n{mix}"),
        ("", "y = x * torch.rand_like(x)\n{mix}"),
        ("", "y = x * torch.bernoulli(torch.full_like(x, 0.7))\n{mix}"),
        ("", "y = x + 0.1 * torch.randn({B}, {T}, {C}, dtype=x.dtype)\n{mix}"),
        ("", "y = F.rrelu(x, training=self.training)\n{mix}"),
        ("", "y = F.gumbel_softmax(x, hard={causal})\n{mix}"),
        ("", "y = {act}(x)[:, torch.randperm({T})]\n{mix}"),
        ("", "y = x * (torch.rand({B}, 1, 1) < 0.8).to(x.dtype)\n{mix}"),
        ("", "y = x * torch.empty_like(x).uniform_(0.5, 1.5)\n{mix}"),
        ("", "y = x + torch.normal(0.0, 0.1, x.shape).to(x.dtype)\n{mix}"),
        ("", "y = torch.randint(0, 3, x.shape) * {act}(x)\n{mix}"),
        ("",
         "y = x * torch.multinomial(x.detach().float().softmax(-1).flatten(0, 1), 1).view({B}, {T}, 1).to(x.dtype) / {C}\n"
         "{mix}"),
        ("", "with torch.no_grad():\n    noise = torch.rand_like(x).exponential_()\ny = {act}(x * noise)\n{mix}"),
        ("", "for p in (0.1, 0.2, 0.3):\n    x = x + F.dropout({act}(x), p, self.training)"),
    ),
    "lookup": (
        ("", "x = x + self.table(tokens).to(x.dtype)"),
        ("self.places{i} = nn.Embedding({T}, {C})", "x = x + self.places{i}(torch.arange({T})).to(x.dtype)"),
        ("self.words{i} = nn.Embedding(32, {C}, padding_idx=0)", "x = x + self.words{i}(tokens).to(x.dtype)"),
        ("self.bag{i} = nn.EmbeddingBag(32, {C}, mode='mean')", "x = x + self.bag{i}(tokens)[:, None].to(x.dtype)"),
        ("", "y = x.gather(1, (tokens % {T})[..., None].expand(-1, -1, {C}))\n{mix}"),
        ("", "y = x[torch.arange({B})[:, None], tokens % {T}]\n{mix}"),
        ("", "y = F.one_hot(tokens % {C}, {C}).to(x.dtype) * x\n{mix}"),
        ("", "y = x.index_select(1, tokens[0] % {T})\n{mix}"),
        ("", "y = torch.take_along_dim(x, x.argsort(1), 1)\n{mix}"),
    ),
    "reduction": (
        ("", "y = x.cumsum(1) / {T}\n{mix}"),
        ("", "y = x.sort(-1).values\n{mix}"),
        ("", "values, places = x.topk(4, -1)\ny = torch.zeros_like(x).scatter(-1, places, values)\n{mix}"),
        ("", "y = x * x.{reduce}(-1, keepdim=True).tanh()\n{mix}"),
        ("", "y = x / (x.norm(dim=(1, 2), keepdim=True) + 1.0)\n{mix}"),
        ("", "y = torch.cdist(x.float(), x.float()).to(x.dtype) @ x / {T}\n{mix}"),
        ("", "y = x.max(1, keepdim=True).values - x.median(1, keepdim=True).values + x\n{mix}"),
        ("", "y = (x.float().clamp(0.5, 1.5).prod(-1, keepdim=True) * x).to(x.dtype)\n{mix}"),
        ("", "y = torch.fft.irfft(torch.fft.rfft(x.float(), dim=1), n={T}, dim=1).to(x.dtype)\n{mix}"),
        ("", "y = torch.logcumsumexp(x.float(), 1).to(x.dtype)\n{mix}"),
    ),
    "gradient flow": (
        ("", "y = x.detach() * x\n{mix}"),
        ("", "y = RoundThrough.apply(x)\n{mix}"),
        ("", "with torch.no_grad():\n    scale = x.abs().mean()\ny = x / (scale + 1.0)\n{mix}"),
        ("self.frozen{i} = nn.Linear({C}, {C}).requires_grad_(False)", "y = {act}(self.frozen{i}(x))\n{mix}"),
        ("self.inner{i} = nn.Sequential(nn.Linear({C}, 4 * {C}), nn.GELU(), nn.Dropout({p}), nn.Linear(4 * {C}, {C}))",
         "y = checkpoint(self.inner{i}, x, use_reentrant=False)\n{mix}"),
        ("self.up{i} = nn.Linear({C}, {C})", "x = self.up{i}(x).detach() + x"),
        ("", "y = x + (x.round() - x).detach()\n{mix}"),
        ("self.dead{i} = nn.Parameter(torch.ones({C}))", "y = x * (self.dead{i} * 0.0 + 1.0)\n{mix}"),
    ),
    "precision": (
        ("self.up{i} = nn.Linear({C}, 2 * {C})\nself.down{i} = nn.Linear(2 * {C}, {C})",
         "with torch.autocast('cpu', torch.bfloat16):\n    y = self.down{i}({act}(self.up{i}(x)))\ny = y.to(x.dtype)\n"
         "{mix}"),
        ("", "y = {act}(x.double()).to(x.dtype)\n{mix}"),
        ("", "y = {act}(x.bfloat16()).to(x.dtype)\n{mix}"),
        ("", "y = x * (x > 0)\n{mix}"),
        ("", "y = (x.float().softmax(-1) @ x.float().mT).to(x.dtype) @ x\n{mix}"),
    ),
    "recurrent": (
        ("self.cell{i} = nn.GRUCell({C}, {C})",
         "h = x[:, 0]\nfor t in range(3):\n    h = self.cell{i}(x[:, t], h)\ny = x + h[:, None]\n{mix}"),
    ),
}  # fmt: skip

RARE = {"recurrent": 0.2, "buffer": 0.8}
"""How often some kinds are drawn, beside 1 for all others."""

ENDS: tuple[Block, ...] = (
    ("", "return x.square().mean()"),
    ("", "return x.float().sum()"),
    ("", "return F.mse_loss(x, x0.detach())"),
    ("", "return F.smooth_l1_loss(x, x0.detach(), beta=0.5), x"),
    ("", "return F.l1_loss(x, torch.zeros_like(x))"),
    ("", "return F.huber_loss(x.float(), x0.detach().float())"),
    ("", "return F.binary_cross_entropy_with_logits(x.float(), (x0 > 0).float())"),
    ("", "return F.kl_div(x.float().log_softmax(-1), x0.detach().float().softmax(-1), reduction='batchmean')"),
    ("", "return F.cosine_embedding_loss(x.flatten(0, 1), x0.flatten(0, 1), torch.ones({B} * {T}))"),
    ("self.head = nn.Linear({C}, 32, bias=False)\nself.head.weight = self.table.weight",
     "logits = self.head(x.to(self.head.weight.dtype))\n"
     "return {{'loss': F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), label_smoothing=0.1), 'logits': logits}}"),
    ("self.head = nn.Linear({C}, 32)",
     "logits = self.head(x)\n"
     "return F.cross_entropy(logits[:, :-1].reshape(-1, 32).float(), tokens[:, 1:].reshape(-1), ignore_index=0)"),
    ("self.head = nn.Linear({C}, 32)",
     "return F.nll_loss(self.head(x).float().log_softmax(-1).mT, tokens), tokens, x.argmax(-1)"),
    ("", "return x"),
    ("", "return x, x.transpose(1, 2), None, 3"),
    ("self.left, self.right = nn.Linear({C}, 4), nn.Linear({C}, 8)",
     "return {{'left': self.left(x), 'right': self.right(x), 'x': x0.detach()}}"),
    ("self.left, self.right = nn.Linear({C}, 4), nn.Linear({C}, 8)",
     "return self.left(x).square().mean(), self.right(x).abs().mean()"),
    ("", "loss = x.square().mean()\nreturn loss, loss, loss.detach()"),
    ("", "return x.square().mean(), x[:, 0], kept[-1]"),
    ("", "return [x[:, 0], x[:, 1].exp()]"),
    ("", "return x.mean() + 0.01 * sum(p.square().sum() for p in self.parameters())"),
    ("", "LOSS return x"),
    ("", "LOSS return x.relu()"),
)  # fmt: skip
"""How forwards end. ``LOSS``: a loss function outside the model goes with it."""

LOSSES = (
    "lambda output: output.float().square().mean()",
    "lambda output: F.mse_loss(output, torch.ones_like(output))",
    "lambda output: F.cross_entropy(output.float().flatten(0, 1), torch.zeros({B} * {T}, dtype=torch.long))",
    "lambda output: output.sum() * 0.5",
)
