-- The counters, one atomic step a call. KEYS[1] is the group's hash tag; every other key begins with
-- it, so one group lies in one slot of a Redis Cluster. ARGV: operation, now in ms (-1: this server's
-- clock), msgpack of the arguments. Answers in msgpack.
--
--   :b:<key>  hash u used, c carry, a at      a token bucket
--   :s:<key>  sorted set id -> lease's end    slots
--   :m:<key>  hash spent, held                money, nano-units
--   :r:<id>   msgpack                         a reservation
--   :l        sorted set id -> lease's end    leases

local base, call, fmod = KEYS[1], redis.call, math.fmod
local RECORD_MS = 7 * 86400000
local MONEY_MS = 40 * 86400000
local SWEEP = 100

local now = tonumber(ARGV[2])
-- What a bucket's key outlives its refill by: a clock from outside may stand while this server's runs.
local slack_ms = now < 0 and 1000 or RECORD_MS
if now < 0 then
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local args = cmsgpack.unpack(ARGV[3])

-- take: key, capacity, period_ms, amount, keep, shadow
local function bucket(take)
  local raw = call('HMGET', base .. ':b:' .. take[1], 'u', 'c', 'a')
  if not raw[1] then return {0, 0, now} end
  local used, carry, at = tonumber(raw[1]), tonumber(raw[2]), tonumber(raw[3])
  local elapsed = now - at
  if elapsed > 0 then
    local capacity, period = take[2], take[3]
    local rest = fmod(elapsed, period)
    local slow = fmod(capacity, period)
    local part = rest * slow + carry
    carry = fmod(part, period)
    used = used - (elapsed - rest) / period * capacity
    used = used - rest * ((capacity - slow) / period) - (part - carry) / period
    at = now
  end
  if used <= 0 then used, carry = 0, 0 end
  return {used, carry, at}
end

local function store(take, state)
  local key = base .. ':b:' .. take[1]
  if state[1] <= 0 then
    call('DEL', key)
    return
  end
  call('HSET', key, 'u', state[1], 'c', state[2], 'a', state[3])
  call('PEXPIRE', key, math.ceil(state[1] / take[2] * take[3]) + slack_ms)
end

local function add(take, difference)
  if difference == 0 then return end
  local state = bucket(take)
  state[1] = math.max(0, state[1] + difference)
  store(take, state)
end

local function load(id)
  local raw = call('GET', base .. ':r:' .. id)
  return raw and cmsgpack.unpack(raw)
end

local function save(id, record)
  call('SET', base .. ':r:' .. id, cmsgpack.pack(record), 'PX', RECORD_MS)
end

local function leave(id, record)
  call('ZREM', base .. ':l', id)
  for _, key in ipairs(record.slots) do call('ZREM', base .. ':s:' .. key, id) end
end

-- A lease that ran out gives back its slots and what lies above `keep`; its money stays held.
local function sweep()
  local due = call('ZRANGEBYSCORE', base .. ':l', '-inf', now, 'LIMIT', 0, SWEEP)
  for _, id in ipairs(due) do
    local record = load(id)
    if not record then
      call('ZREM', base .. ':l', id)
    else
      leave(id, record)
      for _, take in ipairs(record.takes) do
        local kept = math.min(take[5], take[4])
        add(take, kept - take[4])
        take[4] = kept
      end
      if record.held == 0 then call('DEL', base .. ':r:' .. id) else save(id, record) end
    end
  end
end

-- caps: key, cap, spent. Returns what each still allows.
local function affordable(caps)
  local left = {}
  for index, cap in ipairs(caps) do
    local key = base .. ':m:' .. cap[1]
    local raw = call('HMGET', key, 'spent', 'held')
    local spent, held = tonumber(raw[1] or '-1'), tonumber(raw[2] or '0')
    if cap[3] > spent then
      spent = cap[3]
      call('HSET', key, 'spent', spent)
      call('PEXPIRE', key, MONEY_MS)
    end
    left[index] = cap[2] - spent - held
  end
  return left
end

local function hold(caps, amount)
  if amount == 0 then return end -- a negative zero is written "-0", which Redis takes for no integer
  for _, cap in ipairs(caps) do
    call('HINCRBY', base .. ':m:' .. cap[1], 'held', amount)
    call('PEXPIRE', base .. ':m:' .. cap[1], MONEY_MS)
  end
end

local function least(values, start)
  for _, value in ipairs(values) do start = math.min(start, value) end
  return start
end

-- args: id, lease_ms, takes, slots {key, limit, shadow}, need, want, caps
local function reserve(id, lease, takes, slots, need, want, caps)
  local known = load(id)
  if known then return known.answer end
  local states, counts, full, refused = {}, {}, {}, false
  for index, take in ipairs(takes) do
    states[index] = bucket(take)
    if states[index][1] + take[4] > take[2] then
      full[#full + 1] = take[1]
      refused = refused or not take[6]
    end
  end
  for index, slot in ipairs(slots) do
    local key = base .. ':s:' .. slot[1]
    call('ZREMRANGEBYSCORE', key, '-inf', now)
    counts[index] = call('ZCARD', key)
    if counts[index] >= slot[2] then
      full[#full + 1] = slot[1]
      refused = refused or not slot[3]
    end
  end
  local left = affordable(caps)
  local broke = #caps > 0 and least(left, want) < need
  if refused or broke then
    return cmsgpack.pack({0, states, counts, full, left, 0})
  end
  for index, take in ipairs(takes) do
    states[index][1] = states[index][1] + take[4]
    if take[4] > 0 then store(take, states[index]) end
  end
  local granted = #caps > 0 and least(left, want) or 0
  local names = {}
  for index, slot in ipairs(slots) do
    names[index] = slot[1]
    counts[index] = counts[index] + 1
    call('ZADD', base .. ':s:' .. slot[1], now + lease, id)
    call('PEXPIRE', base .. ':s:' .. slot[1], RECORD_MS)
  end
  hold(caps, granted)
  local answer = cmsgpack.pack({1, states, counts, full, left, granted})
  if lease > 0 then
    save(id, {takes = takes, slots = names, caps = caps, held = granted, answer = answer})
    call('ZADD', base .. ':l', now + lease, id)
    call('PEXPIRE', base .. ':l', RECORD_MS)
  end
  return answer
end

local function extend(id, amounts, need, want)
  local record = load(id)
  if not record then return 0 end
  for index, amount in ipairs(amounts) do
    local take = record.takes[index]
    add(take, math.max(0, amount - take[4]))
    take[4] = math.max(amount, take[4])
  end
  local granted = 0
  if #record.caps > 0 and want > 0 then
    local left = {}
    for index, cap in ipairs(record.caps) do
      local raw = call('HMGET', base .. ':m:' .. cap[1], 'spent', 'held')
      left[index] = cap[2] - tonumber(raw[1] or '0') - tonumber(raw[2] or '0')
    end
    granted = least(left, want)
    if granted < math.max(need, 1) then granted = 0 else hold(record.caps, granted) end
    record.held = record.held + granted
  end
  save(id, record)
  return granted
end

local function settle(id, amounts, spent)
  local record = load(id)
  if not record then return 0 end
  for index, amount in ipairs(amounts) do
    add(record.takes[index], amount - record.takes[index][4])
  end
  leave(id, record)
  hold(record.caps, -record.held)
  for _, cap in ipairs(record.caps) do call('HINCRBY', base .. ':m:' .. cap[1], 'spent', spent) end
  call('DEL', base .. ':r:' .. id)
  return 1
end

local function renew(ids, lease)
  for _, id in ipairs(ids) do
    local ends = call('ZSCORE', base .. ':l', id)
    local record = ends and tonumber(ends) > now and load(id)
    if record then
      call('ZADD', base .. ':l', now + lease, id)
      for _, key in ipairs(record.slots) do call('ZADD', base .. ':s:' .. key, now + lease, id) end
    end
  end
  return 1
end

sweep()
local operations = {reserve = reserve, extend = extend, settle = settle, renew = renew}
return operations[ARGV[1]](unpack(args))
